"""What fairscale's two scripts leave to the reader: how processes start and find each other, and something to learn."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from torch import nn

WORLD_SIZE = 2
EPOCHS = 3


def dist_init(rank: int, world_size: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, rank=rank, world_size=world_size)


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and whether the sum of each is positive."""
    inputs = torch.randn(number, 16, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs.sum(1) > 0).long()


def start(train: Callable[[int, int, int], None]) -> None:
    """Call it with rank, world size and epochs: here, where torchrun or dearrun has started us, else in new processes."""
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), EPOCHS)
        return
    with socket.socket() as kept:  # bound, it keeps the port from all who ask for any; rank 0 may listen there
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(kept.getsockname()[1])
        mp.spawn(train, args=(WORLD_SIZE, EPOCHS), nprocs=WORLD_SIZE, join=True)
