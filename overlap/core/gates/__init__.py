"""Gates: whoever reads a parameter waits for its value."""
