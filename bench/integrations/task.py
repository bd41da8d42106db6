"""The task of all libraries: `bench.accuracy`'s small GPT-2, several times as large, on this project's own text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.accuracy.tasks import WORDS, text
from bench.methods.process_group import tell_as_torchrun

__all__ = ["BATCH", "LEARNING_RATE", "Task", "data", "model"]

BATCH = 4  # sentences of a worker in one step
LEARNING_RATE = 3e-4


class Task:
    """The task of a worker, which is its one argument, and the results that rank 0 writes."""

    def __init__(self) -> None:
        given: Mapping[str, Any] = json.loads(sys.argv[1])
        self.method, self.steps, self.output = given["method"], given["steps"], Path(given["output"])
        #: Arguments of torch's DistributedDataParallel, where the method is the library's own.
        self.ddp: Mapping[str, Any] = given["ddp"]
        #: What one process has at once: its share, or the whole batch.
        self.batch = BATCH * (given["workers"] if self.method == "none" else 1)
        self.workers = given["workers"]
        self.ended: list[float] = []
        self._begun = 0.0
        torch.set_num_threads(1)
        if self.method == "ddp":
            tell_as_torchrun()  # also where mpirun has started it

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def step_ended(self) -> None:
        self.ended.append(time.perf_counter() - self._begun)

    def leave(self, losses: Sequence[float]) -> None:
        """Write, on rank 0, the losses of the steps, over the whole batch."""
        self.output.write_text(json.dumps({"loss": list(losses), "seconds": self.ended}))


def model() -> torch.nn.Module:
    """A GPT-2 with 19 million parameters, the same on every rank."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    shape: dict[str, Any] = {"vocab_size": 128, "n_positions": WORDS, "n_embd": 512, "n_layer": 6, "n_head": 8}
    quiet: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config: Any = GPT2Config(use_cache=False, bos_token_id=None, eos_token_id=None, **shape, **quiet)
    made: torch.nn.Module = GPT2LMHeadModel(config)
    return made


def data(steps: int, workers: int) -> list[dict[str, torch.Tensor]]:
    """Sentences for so many steps of all workers, the same on every rank, and in every run while no page is edited."""
    everything, generator = text(), torch.Generator().manual_seed(2)
    starts = torch.randint(len(everything) - WORDS, (steps * workers * BATCH,), generator=generator)
    pieces = [everything[start : start + WORDS] for start in starts.tolist()]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]
