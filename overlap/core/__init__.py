"""The path of a gradient: from its hook into a bucket, reduced, updated, gathered, and awaited."""
