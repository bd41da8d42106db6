"""Compares other libraries' trainers over dear with their own DDP, on the same data: losses and step times."""
