"""A small model, and who listens to what its training steps do, in which order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import dear
from overlap.core.bucket import Slot
from overlap.transport.communicator import Communicator, Work
from tests.spmd.models import WIDTH

__all__ = ["Recorder", "Three"]

_USED = ("inp", "mid", "end")


class Three(nn.Module):
    """Three layers, used from `inp` to `end`, and defined in another order. `inner`: the widths between them."""

    def __init__(self, inner: tuple[int, int] = (WIDTH, WIDTH)) -> None:
        super().__init__()
        sizes = {"inp": (WIDTH, inner[0]), "mid": inner, "end": (inner[1], WIDTH)}
        for name in ("mid", "end", "inp"):
            self.add_module(name, nn.Linear(*sizes[name], bias=False, dtype=torch.float64))
        self.used = _USED

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.used:
            x = torch.tanh(self.get_submodule(name)(x))
        return x


class Recorder:
    """Gradients as they are complete, calls of step(), and operations on all communicators as they are issued."""

    def __init__(self, model: Three) -> None:
        self._model, self._events = model, list[tuple[Communicator | None, str, str, int]]()
        self._hold, self._held, self._released = "", threading.Event(), threading.Event()
        self.passes: Sequence[Sequence[str]] = [_USED]  # layers that each backward pass of a step uses
        for name, layer in model.named_children():
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: self._events.append((None, "gradient", name, 0))
                )

    @contextmanager
    def listening(self) -> Iterator[None]:
        self._events.clear()
        Communicator.listener = self._heard
        try:
            yield
        finally:
            Communicator.listener = None

    def _heard(self, comm: Communicator, work: Work) -> Work:
        label = "" if work.label == work.op else work.label
        self._events.append((comm, work.op, label, work.nbytes))
        if self._hold and label == self._hold and comm.rank == 0:
            self._held.set()
            assert self._released.wait(30), "the test has failed"
        return work

    def hold(self, label: str) -> None:
        """Rank 0's thread that issues the operation of this name does not go on before :meth:`release`."""
        self._held.clear()
        self._released.clear()
        self._hold = label

    def await_hold(self) -> None:
        assert dear.rank() > 0 or self._held.wait(30), f"{self._hold} is not issued"

    def release(self) -> None:
        self._hold = ""
        self._released.set()

    def backward(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dear.rank()), dtype=torch.float64)
        for used in self.passes:
            self._model.used = tuple(used)
            self._model(x).square().mean().backward()

    def step(self, optimizer: Any) -> list[str]:
        """All events of a training step; under co2, of the round that it ends, too."""
        with self.listening():
            self.backward(optimizer)
            self._events.append((None, "step", "", 0))
            optimizer.step()
            rounds = getattr(optimizer, "rounds", None)
            if rounds is not None:  # another thread sees it through
                rounds.arrive()
        return self.events(optimizer)

    def events(self, optimizer: Any) -> list[str]:
        """Buckets are called by their layers, and so are co2's parts, which are told apart by their sizes."""
        layers = {b.label: _layers(b.slots) for b in optimizer.buckets}
        engine, rounds = optimizer._engine, getattr(optimizer, "rounds", None)
        lanes = [list(one) for one in (engine.round._reductions, engine.transit._lanes)]
        parts = (
            {} if rounds is None else {(rounds._comm, p.whole.nbytes): f"of {_layers(p.slots)}" for p in rounds.parts}
        )

        def told(comm: Communicator | None, what: str, label: str, nbytes: int) -> str:
            bucket, dot, number = label.partition(".")
            lane = next((f"on lane {one.index(comm)}" for one in lanes if comm in one and len(one) > 1), "")
            part = "" if comm is None else parts.get((comm, nbytes), "")
            return " ".join(filter(None, (what, layers.get(bucket, bucket) + dot + number, part, lane)))

        return [told(*event) for event in self._events]


def _layers(slots: Sequence[Slot]) -> str:
    return "+".join(slot.name.split(".")[0] for slot in slots)
