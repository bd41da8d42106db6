"""The functions of ``horovod.torch``, under its names: collectives by name, process sets, join, compression."""
