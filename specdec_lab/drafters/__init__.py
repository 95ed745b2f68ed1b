"""Draft strategies: ``base`` says what one is, every other file is one."""
