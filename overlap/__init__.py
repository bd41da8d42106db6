"""What all strategies share: the session, buckets, hooks, gates, and the optimizer shell around the user's optimizer."""
