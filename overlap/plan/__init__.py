"""Plans which tensors travel together, by what that costs (pure, but for a probe of the link)."""
