"""The training methods that benchmarks compare: ours, and those in common use."""
