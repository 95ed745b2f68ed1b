"""Drafters on recorded texts: acceptance at every position, without a clock and without a forward of the target."""
