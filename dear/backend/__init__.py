"""Stock PyTorch over our rings: the backend "dear" of torch.distributed, for tensors of the CPU.

import dear.backend
torch.distributed.init_process_group("dear")    # or "cpu:dear,cuda:nccl"

What follows is torch's own, with any launcher: DDP, fully_shard, DTensor, pipelining, checkpoints. Importing this starts
nothing.
"""

from torch.distributed.distributed_c10d import Backend

from dear.backend.connecting import create
from dear.backend.fully_shard import overlap
from dear.backend.meeting import meet_over_mpi

__all__ = ["overlap"]

Backend.register_backend("dear", create, extended_api=True, devices=["cpu"])
meet_over_mpi()
