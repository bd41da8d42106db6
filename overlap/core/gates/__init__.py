"""Gates: whoever looks at a parameter waits for its value."""
