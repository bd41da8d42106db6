"""The order in which every strategy issues its operations: literal lists of what a small model's steps do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import bytescheduler_adapter
import dear
import mgwfbp
import oss
import wfbp
from overlap.transport.communicator import Communicator, Work
from tests.spmd.models import WIDTH
from tests.spmd.test_parity import as_early_as_possible
from tests.spmd_plugin import SIZE

TIMES = {"end.weight": 1.0, "mid.weight": 0.0, "inp.weight": 1.0}  # the first two gradients come at once
WRAP: dict[str, Callable[..., Any]] = {
    "dear": lambda o, m: dear.DistributedOptimizer(o, m, threshold_mb=0),
    "dear-eager": lambda o, m: as_early_as_possible(dear.DistributedOptimizer(o, m, threshold_mb=0, eager=True)),
    "dear-rb": lambda o, m: dear.DistributedOptimizer(o, m, threshold_mb=0, policy="rb"),
    "wfbp": wfbp.DistributedOptimizer,
    "mgwfbp": lambda o, m: mgwfbp.DistributedOptimizer(o, m, alpha_beta=(1e-3, 0.0), layerwise_times=TIMES),
    "oss": lambda o, m: oss.DistributedOptimizer(o, m, threshold_mb=0),
    "bytescheduler": lambda o, m: bytescheduler_adapter.DistributedOptimizer(
        o, m, partition_mb=0.0004, credit_mb=0.0001
    ),
}
ODD = 1 if SIZE > 1 else 0  # the lane of parameters that rank 1 owns
MEETING = ["barrier step"] if SIZE > 1 else []  # where a rank may have nothing to receive in the last reduction
BACKWARD = ["gradient end", "gradient mid", "gradient inp"]
#: Of the first step, which learns, and of the second.
EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "dear": (
        [
            *BACKWARD,
            "step",
            "reduce_scatter end",
            "reduce_scatter mid",
            "reduce_scatter inp",
            "all_gather inp",
            "all_gather mid",
            "all_gather end",
        ],
        [
            "gradient end",
            "reduce_scatter end",
            "gradient mid",
            "reduce_scatter mid",
            "gradient inp",
            "step",
            "reduce_scatter inp",
            "all_gather inp",
            "all_gather mid",
            "all_gather end",
        ],
    ),
    "dear-eager": (
        [
            *BACKWARD,
            "step",
            "reduce_scatter end",
            "reduce_scatter mid",
            "reduce_scatter inp",
            "all_gather end",
            "all_gather mid",
            "all_reduce early updates",
            "all_gather inp",
        ],
        [
            "gradient end",
            "reduce_scatter end",
            "gradient mid",
            "all_gather end",
            "reduce_scatter mid",
            "gradient inp",
            "step",
            "reduce_scatter inp",
            "all_gather mid",
            "all_reduce early updates",
            "all_gather inp",
        ],
    ),
    "dear-rb": (
        [
            *BACKWARD,
            "step",
            "reduce end",
            "reduce mid",
            "reduce inp",
            *MEETING,
            "broadcast inp",
            "broadcast mid",
            "broadcast end",
        ],
        [
            "gradient end",
            "reduce end",
            "gradient mid",
            "reduce mid",
            "gradient inp",
            "step",
            "reduce inp",
            *MEETING,
            "broadcast inp",
            "broadcast mid",
            "broadcast end",
        ],
    ),
    "wfbp": (
        [
            *BACKWARD,
            "step",
            "all_reduce end",
            "all_reduce mid",
            "all_reduce inp",
        ],
        [
            "gradient end",
            "all_reduce end",
            "gradient mid",
            "all_reduce mid",
            "gradient inp",
            "all_reduce inp",
            "step",
        ],
    ),
    "mgwfbp": (
        [
            *BACKWARD,
            "step",
            "all_reduce end+mid",
            "all_reduce inp",
        ],
        [
            "gradient end",
            "gradient mid",
            "all_reduce end+mid",
            "gradient inp",
            "all_reduce inp",
            "step",
        ],
    ),
    "oss": (
        [
            *BACKWARD,
            "step",
            f"reduce_scatter end on lane {ODD}",
            "reduce_scatter mid on lane 0",
            "reduce_scatter inp on lane 0",
            *(f"{barrier} on lane 0" for barrier in MEETING),
            "all_gather inp on lane 0",
            "all_gather mid on lane 0",
            f"all_gather end on lane {ODD}",
        ],
        [
            "gradient end",
            f"reduce_scatter end on lane {ODD}",
            "gradient mid",
            "reduce_scatter mid on lane 0",
            "gradient inp",
            "step",
            "reduce_scatter inp on lane 0",
            *(f"{barrier} on lane 0" for barrier in MEETING),
            "all_gather inp on lane 0",
            "all_gather mid on lane 0",
            f"all_gather end on lane {ODD}",
        ],
    ),
}


@pytest.fixture(autouse=True)
def _session() -> None:
    dear.init()


class Three(nn.Module):
    """Three layers of one size, used from `inp` to `end`, and defined in another order."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mid", "end", "inp"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64))
        self.used = ("inp", "mid", "end")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.used:
            x = torch.tanh(self.get_submodule(name)(x))
        return x


class Recorder:
    """Gradients as they are complete, calls of step(), and operations on all communicators as they are issued."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._events = model, list[tuple[Communicator | None, str, str]]()
        self._hold, self._held, self._released = "", threading.Event(), threading.Event()
        self.passes = 1
        for name, layer in model.named_children():
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: self._events.append((None, "gradient", name))
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
        if work.label != work.op:  # else what ranks tell each other once, such as what the first iteration taught
            self._events.append((comm, work.op, work.label))
        if work.label == self._hold and comm.rank == 0:
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
        for _ in range(self.passes):
            self._model(x).square().mean().backward()

    def step(self, optimizer: Any) -> list[str]:
        """All events of a training step."""
        with self.listening():
            self.backward(optimizer)
            self._events.append((None, "step", ""))
            optimizer.step()
        return self.events(optimizer)

    def events(self, optimizer: Any) -> list[str]:
        """Buckets are called by their layers."""
        layers = {b.label: "+".join(slot.name.split(".")[0] for slot in b.slots) for b in optimizer.buckets}
        engine = optimizer._engine
        lanes = (engine._reductions, engine.transit._lanes)

        def told(comm: Communicator | None, what: str, label: str) -> str:
            bucket, dot, part = label.partition(".")
            lane = next((f"on lane {one.index(comm)}" for one in lanes if comm in one and len(one) > 1), "")
            return " ".join(filter(None, (what, layers.get(bucket, bucket) + dot + part, lane)))

        return [told(*event) for event in self._events]


def _made(strategy: str, frozen: Sequence[str] = ()) -> tuple[Three, Any, Recorder]:
    torch.manual_seed(3)
    model = Three()
    recorder = Recorder(model)
    for layer in frozen:
        model.get_submodule(layer).requires_grad_(False)
    return model, WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1), model), recorder


@pytest.mark.parametrize("strategy", EXPECTED)
def test_two_steps(strategy: str) -> None:
    _, optimizer, recorder = _made(strategy)
    first, second = recorder.step(optimizer), recorder.step(optimizer)
    assert first == EXPECTED[strategy][0]
    assert second == EXPECTED[strategy][1]


def test_parameters_unfrozen_one_after_the_other_are_reduced_under_backward() -> None:
    for strategy in ("dear", "wfbp"):
        model, optimizer, recorder = _made(strategy, frozen=("inp", "mid"))
        recorder.step(optimizer)
        for layer in (model.mid, model.inp):
            layer.requires_grad_(True)
            recorder.step(optimizer)
        assert recorder.step(optimizer) == EXPECTED[strategy][1]


def test_a_parameter_added_later_is_reduced_under_backward() -> None:
    model = Three()
    recorder = Recorder(model)
    inner = torch.optim.SGD([*model.end.parameters(), *model.mid.parameters()], 0.1)
    optimizer = wfbp.DistributedOptimizer(inner, model)
    recorder.step(optimizer)
    optimizer.add_param_group({"params": list(model.inp.parameters())})
    recorder.step(optimizer)
    assert recorder.step(optimizer) == EXPECTED["wfbp"][1]


def test_what_was_unused_at_first_is_awaited_as_often_as_what_was_used_most() -> None:
    model, optimizer, recorder = _made("wfbp")
    recorder.passes = 2
    model.used = ("mid", "end")
    recorder.step(optimizer)
    model.used = ("inp", "mid", "end")
    assert recorder.step(optimizer) == [*BACKWARD, *EXPECTED["wfbp"][1]]


def _operations(recorder: Recorder, optimizer: Any) -> list[str]:
    """Another thread issues them, at any time between gradients."""
    return [event for event in recorder.events(optimizer) if event.startswith("all_reduce")]


def test_two_steps_of_bytescheduler() -> None:
    """While rank 0 is held back at the first partition, all others become ready."""
    model, optimizer, recorder = _made("bytescheduler")
    with recorder.listening():
        recorder.hold("b0.0")
        recorder.backward(optimizer)
        optimizer.step()
        recorder.release()
        optimizer.synchronize()
    assert _operations(recorder, optimizer) == [
        "all_reduce inp.0",
        "all_reduce inp.1",
        "all_reduce mid.0",
        "all_reduce mid.1",
        "all_reduce end.0",
        "all_reduce end.1",
    ]
    model.mid.weight.register_hook(lambda _: recorder.await_hold())
    with recorder.listening():
        recorder.hold("b2.0")
        recorder.backward(optimizer)
        optimizer.step()
        recorder.release()
        optimizer.synchronize()
    assert _operations(recorder, optimizer) == [
        "all_reduce end.0",
        "all_reduce inp.0",
        "all_reduce inp.1",
        "all_reduce mid.0",
        "all_reduce mid.1",
        "all_reduce end.1",
    ]


def test_no_step_of_bytescheduler_overtakes_another() -> None:
    """The last layer's partitions still wait for their turn when gradients of the next step, more urgent, are there."""
    model, optimizer, recorder = _made("bytescheduler")
    with recorder.listening():
        recorder.hold("b2.0")
        recorder.backward(optimizer)
        optimizer.step()
        recorder.await_hold()
        model.used = ("inp", "mid")  # so that nobody waits for the last layer
        recorder.backward(optimizer)
        recorder.release()
        optimizer.step()
        optimizer.synchronize()
    assert _operations(recorder, optimizer) == [
        "all_reduce inp.0",
        "all_reduce inp.1",
        "all_reduce mid.0",
        "all_reduce mid.1",
        "all_reduce end.0",
        "all_reduce end.1",
        "all_reduce inp.0",
        "all_reduce inp.1",
        "all_reduce mid.0",
        "all_reduce mid.1",
        "all_reduce end.0",
        "all_reduce end.1",
    ]
