"""Outer rules beside CO2's own, of several workers in one process, as `co2_simulation` has that one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import co2
from co2.fragments.codec import codec_of
from co2.fragments.sparse_codec import SparseCodec
from tests.spmd.co2_simulation import Simulation, mean_of
from tests.spmd.co2_training import loss_of, small_model

__all__ = [
    "RULES",
    "STREAMING",
    "STREAMING_CASES",
    "Halves",
    "Sparse",
    "Waiting",
    "simulation_of",
    "streaming_simulation",
]

# Outer rates and momenta.
RULES = {"localsgd": (1.0, 0.0), "slowmo": (1.0, 0.5), "diloco": (0.7, 0.9), "eager": (0.4, 0.9)}
STREAMING: dict[str, Any] = {"outer": "streaming-diloco", "outer_lr": 0.6, "outer_momentum": 0.8}
STREAMING_CASES: dict[str, dict[str, Any]] = {
    "two fragments": {"outer_frequency": 5, "fragments": 2, "overlap_steps": 1, "mixing": 0.5},
    "hidden": {"outer_frequency": 3, "fragments": 1, "overlap_steps": 3, "mixing": 0.25},
    "waiting": {"outer_frequency": 4, "fragments": 2, "overlap_steps": 0, "mixing": 0.0},
}
Values = list[torch.Tensor]


class Waiting(Simulation):
    """Rules that wait: x and m are the same for all workers."""

    def __init__(self, rule: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rule, self.rates = rule, list[float]()

    def step(self, *arguments: Any, **options: Any) -> None:
        self.rates.append(self.workers[0][1].param_groups[0]["lr"])
        super().step(*arguments, **options)

    def turn(self) -> None:
        moved = [x - a for x, a in zip(self.start, self._mean(), strict=True)]
        if self.rule == "localsgd":
            self.start = self._mean()
        elif self.rule == "slowmo":
            gamma = sum(self.rates) / len(self.rates)
            self.m = [self.beta * m + d / gamma for m, d in zip(self.m, moved, strict=True)]
            self.start = [x - self.lr * gamma * m for x, m in zip(self.start, self.m, strict=True)]
        else:
            self.m = [self.beta * m + d for m, d in zip(self.m, moved, strict=True)]
            steps = [d + self.beta * m for d, m in zip(moved, self.m, strict=True)]
            self.start = [x - self.lr * step for x, step in zip(self.start, steps, strict=True)]
        self.next = list(self.start)
        self._set(self.start)
        self.in_round, self.rates = 0, []

    def average(self) -> None:
        super().average()
        self.rates = []


class Eagerly(Simulation):
    """Each worker has an x and an m of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        zeros = [torch.zeros_like(value) for value in self.start]
        self.x = [list(self.start) for _ in self._all]
        self.own, self.momenta = [zeros for _ in self._all], [zeros for _ in self._all]
        self.arrived = zeros
        self.weight, self.left = 0.0, len(self.workers)

    def turn(self) -> None:
        progress = [[x - y for x, y in zip(self.x[worker], self._values(worker), strict=True)] for worker in self._all]
        weight = 1 / (self.left if self.joined else len(self.workers))  # who is left is known a round late
        for worker in self._all:
            pairs = zip(progress[worker], self.own[worker], self.arrived, strict=True)
            gradients = [weight * d + (a - self.weight * before) for d, before, a in pairs]
            self.momenta[worker] = [self.beta * m + g for m, g in zip(self.momenta[worker], gradients, strict=True)]
            steps = [g + self.beta * m for g, m in zip(gradients, self.momenta[worker], strict=True)]
            self.x[worker] = [x - self.lr * step for x, step in zip(self.x[worker], steps, strict=True)]
            with torch.no_grad():
                for param, value in zip(self.workers[worker][0].parameters(), self.x[worker], strict=True):
                    param.copy_(value)
        left = self._left(self.counted)
        self.own, self.weight, self.left = progress, weight, len(left)
        self.arrived = mean_of([progress[worker] for worker in left])
        self.in_round = 0

    def average(self) -> None:
        """What would arrive late counts before, as part of the last outer step."""
        for worker in self._all:
            late = [a - self.weight * before for before, a in zip(self.own[worker], self.arrived, strict=True)]
            self.momenta[worker] = [m + g for m, g in zip(self.momenta[worker], late, strict=True)]
            with torch.no_grad():
                for param, g in zip(self.workers[worker][0].parameters(), late, strict=True):
                    param -= self.lr * (1 + self.beta) * g
        self._set(self._mean())
        self.x = [self._values(worker) for worker in self._all]
        zeros = [torch.zeros_like(value) for value in self.start]
        self.own, self.arrived, self.in_round = [zeros for _ in self._all], zeros, 0
        self.counted = list(self.steps_of)


def simulation_of(rule: str, make: Any, workers: int) -> Simulation:
    """Of one of RULES."""
    lr, momentum = RULES[rule]
    options = {"frequency": 3, "lr": lr, "momentum": momentum}
    if rule == "eager":
        return Eagerly(small_model(), make, workers, **options)
    return Waiting(rule, small_model(), make, workers, **options)


_MEMBERS = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]]}  # parameters by fragment
_ALIGNED = 8  # fp64 elements, where parameters and shards begin


class Streaming(Simulation):
    """Of each fragment: x, m and r, and of each worker e, as rows, one per shard."""

    def __init__(self, *arguments: Any, outer_frequency: int, fragments: int, bits: int | None, **options: Any) -> None:
        self.overlap, self.mixing = options.pop("overlap_steps"), options.pop("mixing")
        super().__init__(*arguments, frequency=outer_frequency, **options)
        self.members, self.codec, self.bits = _MEMBERS[fragments], codec_of(bits), bits
        self.x = [self._rows(self.start, fragment) for fragment in range(fragments)]
        self.momenta, self.r = ([torch.zeros_like(x) for x in self.x] for _ in range(2))
        self.e = [[torch.zeros_like(x) for x in self.x] for _ in self._all]
        self.sent = [list(self.steps_of) for _ in self.x]  # steps that were in the last turn of each fragment
        self._begin()

    def _begin(self) -> None:
        self.steps = self.turns = 0
        self.due: int | None = None

    def _places(self, fragment: int) -> list[tuple[int, int]]:
        """Where parameters begin, and where they end."""
        places, end = [], 0
        for index in self.members[fragment]:
            begin = -(-end // _ALIGNED) * _ALIGNED
            end = begin + self.start[index].numel()
            places.append((begin, end))
        return places

    def _rows(self, values: Sequence[torch.Tensor], fragment: int) -> torch.Tensor:
        places, workers = self._places(fragment), len(self.workers)
        step = _ALIGNED * workers
        flat = torch.zeros(-(-places[-1][1] // step) * step, dtype=torch.float64)
        for index, (begin, end) in zip(self.members[fragment], places, strict=True):
            flat[begin:end] = values[index].flatten()
        return flat.view(workers, -1)

    def _said(self, rows: torch.Tensor) -> torch.Tensor:
        return self.codec.decode(self.codec.encode(rows), rows.shape[1], rows.dtype)

    def step(self, *arguments: Any, **options: Any) -> None:
        self.in_round = -1  # the turns are counted here
        super().step(*arguments, **options)
        self.steps += 1
        if self.due == self.steps:
            self._apply()
        if self.steps == (self.turns + 1) * self.frequency // len(self.members):
            self._send(self.turns % len(self.members))
            self.turns, self.due = self.turns + 1, self.steps + self.overlap
            if self.overlap == 0:
                self._apply()

    def _send(self, fragment: int) -> None:
        said = []
        for worker in self._left(self.sent[fragment]):
            meant = self.x[fragment] - self._rows(self._values(worker), fragment) + self.e[worker][fragment]
            said.append(self._said(meant))
            self.e[worker][fragment] = meant - said[-1]
        self.sent[fragment] = list(self.steps_of)
        mean = sum(said[1:], said[0]) / len(said)
        self.momenta[fragment] = self.beta * self.momenta[fragment] + mean
        meant = self.r[fragment] - self.lr * (mean + self.beta * self.momenta[fragment])
        self.r[fragment] = meant - self._said(meant)
        self.x[fragment] = self.x[fragment] + self._said(meant)

    def _apply(self) -> None:
        fragment = (self.turns - 1) % len(self.members)
        flat = self.x[fragment].flatten()
        for worker in self._all:
            params = list(self.workers[worker][0].parameters())
            for index, (begin, end) in zip(self.members[fragment], self._places(fragment), strict=True):
                arrived = flat[begin:end].view_as(params[index])
                with torch.no_grad():
                    params[index].copy_(self.mixing * params[index] + (1 - self.mixing) * arrived)
        self.due = None

    def average(self) -> None:
        if self.due is not None:
            self._apply()
        mean = self._mean()
        self._set(mean)
        self.x = [self._rows(mean, fragment) for fragment in range(len(self.members))]
        self.sent = [list(self.steps_of) for _ in self.x]
        self._begin()


def streaming_simulation(make: Any, bits: int | None, case: dict[str, Any]) -> Streaming:
    return Streaming(small_model(), make, co2.size(), bits=bits, lr=0.6, momentum=0.8, **case)


class Sparse(Simulation):
    """Of the one fragment x, and of each worker e: a list entry per parameter."""

    def __init__(self, *arguments: Any, top_k: int, bits: int | None, overlap: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.codec, self.overlap, self.mixing = SparseCodec(top_k, bits), overlap, 0.5 if overlap else 0.0
        self.x, self.pending = list(self.start), False
        self.e = [[torch.zeros_like(x) for x in self.x] for _ in self._all]

    def step(self, *arguments: Any, **options: Any) -> None:
        super().step(*arguments, **options)
        if self.pending and self.in_round == self.overlap % self.frequency:
            self._apply()

    def turn(self) -> None:
        if self.pending:
            self._apply()
        said = []
        for worker in self._left(self.counted):
            meant = [(x - y) + 0.95 * e for x, y, e in zip(self.x, self._values(worker), self.e[worker], strict=True)]
            said.append([self._said(one) for one in meant])
            self.e[worker] = [a - b for a, b in zip(meant, said[-1], strict=True)]
        totals = [sum(column[1:], column[0]) for column in zip(*said, strict=True)]
        self.x = [x - self.lr * (total / len(said)) for x, total in zip(self.x, totals, strict=True)]
        self.in_round, self.pending = 0, True
        if self.overlap == 0:
            self._apply()

    def _said(self, meant: torch.Tensor) -> torch.Tensor:
        flat = meant.flatten()
        return self.codec.decode(self.codec.encode(flat), flat.numel(), flat.dtype).view_as(meant)

    def _apply(self) -> None:
        for model, _ in self.workers:
            for param, x in zip(model.parameters(), self.x, strict=True):
                with torch.no_grad():
                    param.copy_(self.mixing * param + (1 - self.mixing) * x)
        self.pending = False

    def average(self) -> None:
        if self.pending:
            self._apply()
        self.x = self._mean()
        self._set(self.x)
        self.in_round, self.counted = 0, list(self.steps_of)


class Halves:
    """ACCO: `model` has what gradients are computed at, `exact` what the optimizer has come to."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], frequency: int) -> None:
        self.model, self.exact = small_model(), small_model()
        self.optimizer = make(self.exact.parameters())
        self.frequency, self.half = frequency, 0
        self.coming = self._values()
        self.first: tuple[Values, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self.sums = [[torch.zeros_like(value) for value in self.coming] for _ in range(co2.size())]
        self.count = self.in_round = 0

    def _values(self) -> Values:
        return [param.detach().clone() for param in self.exact.parameters()]

    def step(self, step: int, skip: Sequence[int] = ()) -> None:
        for worker in range(co2.size()):
            gradients = torch.autograd.grad(loss_of(self.model, worker, step), list(self.model.parameters()))
            if worker not in skip:
                self.sums[worker] = [a + b for a, b in zip(self.sums[worker], gradients, strict=True)]
                self.count += 1
        self.in_round += 1
        if self.in_round == self.frequency:
            self.turn()

    def turn(self) -> None:
        arrived, total = self.coming, [sum(column[1:], column[0]) for column in zip(*self.sums, strict=True)]
        if self.half % 2 == 0:
            state, values = copy.deepcopy(self.optimizer.state_dict()), self._values()
            self._update(total, self.count)
            self.coming, self.first = self._values(), (total, self.count)
            self.optimizer.load_state_dict(state)
            self._put(self.exact, values)
        else:
            self.commit(total)
        self._put(self.model, arrived)
        self.half += 1
        self._begin()

    def commit(self, total: Values) -> None:
        before, count = self.first or ([torch.zeros_like(one) for one in total], 0)
        self._update([a + b for a, b in zip(total, before, strict=True)], self.count + count)
        self.coming, self.first = self._values(), None

    def average(self) -> None:
        self.commit([sum(column[1:], column[0]) for column in zip(*self.sums, strict=True)])
        self._put(self.model, self.coming)
        self.half = 0
        self._begin()

    def _update(self, total: Values, count: int) -> None:
        if count:
            for param, gradient in zip(self.exact.parameters(), total, strict=True):
                param.grad = gradient / count
            self.optimizer.step()

    @staticmethod
    def _put(model: nn.Module, values: Values) -> None:
        with torch.no_grad():
            for param, value in zip(model.parameters(), values, strict=True):
                param.copy_(value)
