"""The ways to train on several ranks that benchmarks compare: ours, and what people use today."""
