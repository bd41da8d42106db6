"""The buckets of an optimizer, and their memory: learned in the first iteration, planned, extended, and rebuilt."""
