"""What the user holds: the wrapper, its arguments, and the watch over the user's own optimizer."""
