"""Checkpoints, and other files and tensors in which a model and its optimizers are handed out."""
