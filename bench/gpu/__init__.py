"""All checks that a machine with one GPU can run: ``python -m bench.gpu``."""
