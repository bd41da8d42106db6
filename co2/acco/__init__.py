"""ACCO: gradients travel half a batch late, and the inner optimizer steps at the owners of shards."""
