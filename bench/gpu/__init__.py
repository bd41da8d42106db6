"""What a machine with one GPU has to show: ``python -m bench.gpu``."""
