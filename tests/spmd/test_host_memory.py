"""Memory that the ranks of a host share."""

from __future__ import annotations

from pathlib import Path

import torch

import dear
from overlap.job.memory.host_memory import host_memory
from overlap.job.session import current


def test_what_a_rank_writes_its_host_reads() -> None:
    memory = host_memory(current())
    assert host_memory(current()) is memory
    shared = memory.zeros(3 * memory.comm.size, torch.float32)
    mine = shared[3 * memory.comm.rank : 3 * memory.comm.rank + 3]
    mine.fill_(memory.comm.rank + 1)
    dear.barrier()
    assert shared.tolist() == [float(rank + 1) for rank in range(memory.comm.size) for _ in range(3)]
    dear.barrier()
    assert not list(Path("/dev/shm").glob("dear-*")), "no name is left behind"
    dear.barrier()
    assert memory.zeros(0, torch.uint8).numel() == 0
