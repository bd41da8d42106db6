"""Other libraries' trainers over dear and over their own DDP, on the same data: losses, and the time of a step."""
