"""The mechanism that all strategies share: session, buckets, hooks, gates, and the wrapper of the user's optimizer."""
