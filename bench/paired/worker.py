"""One rank of ``python -m bench.paired``: learns a task by two methods, block by block in turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from bench.accuracy.tasks import TASKS
from bench.methods.method import Method
from bench.methods.registry import method
from bench.program import sent_bytes

__all__ = ["main"]

_LEAST, _MOST = 12, 80  # steps before the first block: until a method has planned


class _Trainer:
    """One method with a model of its own."""

    def __init__(self, chosen: Method, name: str, rank: int) -> None:
        task = TASKS[name]
        torch.manual_seed(1)
        self._method = chosen
        self._model, self._optimizer = chosen.distribute(task.build(), (task.optimizer, task.arguments))
        self._loss, self._generator = task.loss(), torch.Generator().manual_seed(1000 + rank)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._loss(self._model, self._generator).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def warm_up(self) -> None:
        for number in range(_MOST):
            if number >= _LEAST and not self._method.tuning(self._optimizer):
                break
            self.step()
        self._method.settle(self._optimizer)

    def block(self, steps: int) -> tuple[float, float, float]:
        """Seconds, processor seconds, and bytes that this host sent, per step."""
        dist.barrier()
        cpu, sent, begun = time.process_time(), sent_bytes(), time.perf_counter()
        for _ in range(steps):
            self.step()
        self._method.settle(self._optimizer)
        taken = (time.perf_counter() - begun, time.process_time() - cpu)
        dist.barrier()  # the other ranks of this host have sent theirs, too
        return taken[0] / steps, taken[1] / steps, (sent_bytes() - sent) / steps


def main(argv: list[str]) -> None:
    """Train; `argv`: a file for what was measured, and its settings as JSON."""
    output, settings = Path(argv[0]), json.loads(argv[1])
    torch.set_num_threads(1)
    methods = [method(settings[name]) for name in ("first", "second")]
    places = [one.join(torch.device("cpu")) for one in methods]  # the second finds the first one's torch.distributed
    first, second = (_Trainer(one, settings["task"], places[0].rank) for one in methods)
    for trainer in (first, second):
        trainer.warm_up()
    found: dict[str, list[tuple[float, float, float]]] = {"first": [], "second": []}
    turns: list[tuple[str, Callable[[int], tuple[float, float, float]]]] = [
        ("first", first.block),
        ("second", second.block),
    ]
    for number in range(settings["blocks"]):
        for name, block in turns if number % 2 else reversed(turns):
            found[name].append(block(settings["steps"]))
    if places[0].rank == 0:
        figures = ("seconds", "cpu_seconds", "sent_bytes")
        rows = {figure: {name: [one[at] for one in found[name]] for name in found} for at, figure in enumerate(figures)}
        output.write_text(json.dumps(rows))
    for one in reversed(methods):
        one.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
