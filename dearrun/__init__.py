"""Starts training jobs on the machine's MPI: ``dearrun -np 4 -H host1:2,host2:2 python train.py``."""
