"""Training of draft heads by distillation: data, features, losses, and the only training loop."""
