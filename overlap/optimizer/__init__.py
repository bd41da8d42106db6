"""The wrapper that users hold, its arguments, and the watch over the user's own optimizer."""
