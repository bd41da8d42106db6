"""Every step of a run from its first on, and a network that changes while it trains."""
