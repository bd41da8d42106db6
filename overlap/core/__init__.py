"""The path of a gradient: from its hook into a bucket, which is reduced, updated, gathered and awaited."""
