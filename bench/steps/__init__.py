"""Measures every step of a run from the first on, while the network may change."""
