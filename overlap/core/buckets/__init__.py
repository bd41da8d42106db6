"""The buckets of an optimizer: learned in the first iteration, planned, extended, and rebuilt."""
