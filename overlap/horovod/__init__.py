"""What ``horovod.torch`` offers, under its names: collectives by name, process sets, join, compression."""
