"""ACCO: gradients are averaged half a batch late, and each rank's inner optimizer updates its shards."""
