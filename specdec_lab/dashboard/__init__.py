"""The comparison dashboard on Weights & Biases: built here, published when asked for."""
