"""Which tensors travel together, and what that costs (pure, but for a probe of the link)."""
