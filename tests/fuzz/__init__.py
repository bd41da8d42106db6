"""Random training scripts, run on real ranks and compared with one process: ``python -m tests.fuzz --seeds 0:1000``."""
