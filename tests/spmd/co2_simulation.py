"""CO2 of several workers in one process, written down anew on whole parameters: nothing is flat, sharded or in flight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Simulation", "mean_of"]

Worker = tuple[torch.nn.Module, torch.optim.Optimizer]


class Simulation:
    """`workers` replicas of `model`, each with an optimizer of its own; a list entry per parameter everywhere."""

    def __init__(
        self,
        model: torch.nn.Module,
        make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        workers: int,
        *,
        frequency: int,
        lr: float = 1.0,
        momentum: float = 0.0,
        clip: float | None = None,
        penalty: bool | float = False,
    ) -> None:
        models = [copy.deepcopy(model) for _ in range(workers)]
        self.workers: list[Worker] = [(m, make(list(m.parameters()))) for m in models]
        self.frequency, self.lr, self.beta, self.clip, self.penalty = frequency, lr, momentum, clip, penalty
        self.start = self._values(0)
        self.next = list(self.start)
        self.m = [torch.zeros_like(value) for value in self.start]
        self.longest, self.in_round = 0.0, 0
        self.gaps: list[float] = []
        self.joined: set[int] = set()  # workers that are out of data
        self.steps_of = [0] * workers  # local ones
        self.counted = [0] * workers  # of those, before the round that is under way

    def _values(self, worker: int) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.workers[worker][0].parameters()]

    def _mean(self) -> list[torch.Tensor]:
        return mean_of([self._values(worker) for worker in self._left(self.counted)])

    def _left(self, counted: Sequence[int]) -> list[int]:
        """Workers that count in a mean: a joined one does once more, for steps beyond those that are `counted`."""
        return [worker for worker in self._all if worker not in self.joined or self.steps_of[worker] > counted[worker]]

    @property
    def _all(self) -> range:
        return range(len(self.workers))

    def _set(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for model, _ in self.workers:
                for param, value in zip(model.parameters(), values, strict=True):
                    param.copy_(value)

    def step(self, loss: Callable[[torch.nn.Module, int], torch.Tensor], skip: Sequence[int] = ()) -> None:
        """Every worker that has data, but those of `skip`, makes a local step; then perhaps the outer one."""
        for number, (model, optimizer) in enumerate(self.workers):
            if number in self.joined:
                continue
            self.steps_of[number] += 1
            optimizer.zero_grad()
            loss(model, number).backward()
            if number not in skip:
                optimizer.step()
        self.in_round += 1
        if self.in_round == self.frequency:
            self.turn()
            self.counted = list(self.steps_of)

    def turn(self) -> None:
        mean, before = self._mean(), self.start
        self.start = self.next
        self._set(self.start)
        moved = float(sum(((a - b) ** 2).sum() for a, b in zip(self.start, before, strict=True)) ** 0.5)
        self.longest = max(self.longest, moved)
        gap: Any = 1.0 if self.penalty is False else self.penalty
        if self.penalty is True:
            gap = 1 + moved / self.longest if self.longest else 1.0
        self.gaps.append(gap)
        self.m = [self.beta * m + (b - a) / gap for m, b, a in zip(self.m, before, mean, strict=True)]
        if self.clip is not None:
            self.m = [m.clamp(-self.clip, self.clip) for m in self.m]
        self.next = [x - self.lr * m for x, m in zip(self.start, self.m, strict=True)]
        self.in_round = 0

    def average(self) -> None:
        mean = self._mean()
        self.next = [a + (n - s) for a, n, s in zip(mean, self.next, self.start, strict=True)]
        self.start = list(self.next)
        self._set(self.start)
        self.in_round = 0
        self.counted = list(self.steps_of)


def mean_of(values: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [sum(column[1:], column[0]) / len(column) for column in zip(*values, strict=True)]
