"""What an optimizer's step() writes to its groups and to itself: as in one process, also where it updates parts."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

import dear
import oss
from tests.spmd.one_process import SGD, as_in_one_process, loss_of, small_model, train
from tests.spmd.strategies import WRAP
from tests.spmd_plugin import SIZE

pytestmark = pytest.mark.four_ranks


class _Schedule:
    def __init__(self) -> None:
        self.calls = [0]

    def __call__(self) -> float:
        self.calls[0] += 1
        return 1 / self.calls[0]


class Counting(torch.optim.Optimizer):
    """Its rate falls with a count that stands in `where`."""

    def __init__(self, params: Any, lr: float, momentum: float, where: str = "group") -> None:
        del momentum
        super().__init__(params, {"lr": lr, "steps": 0, "tensor": None, "rates": None})
        self.where, self.steps, self.schedule, self.seen = where, 0, _Schedule(), deque([0], maxlen=3)
        for group in self.param_groups:
            group["tensor"], group["rates"] = torch.zeros(()), [1.0]

    def _count(self, group: dict[str, Any]) -> float:
        rates = {
            "group": lambda: 1 / group["steps"],
            "attribute": lambda: 1 / self.steps,
            "tensor": lambda: 1 / float(group["tensor"]),
            "schedule": lambda: 1 / self.schedule.calls[0],
            "list": lambda: group["rates"][-1],
            "state": lambda: 1 / self.state["steps"],  # type: ignore[call-overload]
            "last": lambda: 1 / (self.seen[-1] + 1),
        }
        return float(rates[self.where]())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.seen.append(self.steps)
        self.schedule()
        self.state["steps"] = (self.state.get("steps") or 0) + 1  # type: ignore[call-overload, index, operator, assignment]
        for group in self.param_groups:
            group["steps"] += 1
            group["tensor"] += 1
            group["rates"].append(group["rates"][-1] * 0.5)
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * (group["lr"] * self._count(group)))


PLACES = ("group", "attribute", "tensor", "schedule", "list", "state", "last")


def _kept(optimizer: Any) -> list[Any]:
    saved = optimizer.state_dict()
    groups = [
        (group["steps"], float(group["tensor"]), list(group["rates"]))
        for group in (*optimizer.param_groups, *saved["param_groups"])
    ]
    return [*groups, optimizer.steps, list(optimizer.seen), optimizer.schedule.calls[0], saved["state"].get("steps")]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("way", WRAP)
def test_what_a_step_counts_is_counted_once(way: str, where: str) -> None:
    """In two groups, one of which is a single number, which most ranks have no part of; a step without gradients counts."""
    found = []

    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            optimizer.zero_grad()
            if step != 2:
                loss_of(model, step, alone).backward()
            held = optimizer.param_groups[0]["tensor"]
            optimizer.step()
            assert held is optimizer.param_groups[0]["tensor"]
        found.append(_kept(optimizer))

    def make(params: Any, **settings: float) -> Any:
        *most, last = params
        return Counting([{"params": most}, {"params": [last]}], **settings, where=where)

    as_in_one_process(way, script, make, elementwise=True)
    assert found[1] == found[0]


@pytest.mark.parametrize("where", PLACES)
def test_it_counts_once_under_sharded_data_parallel(where: str) -> None:
    reference, model = small_model(), small_model()
    alone = Counting(reference.parameters(), 0.1, 0.0, where=where)
    train(reference, alone, True, steps=4)
    optimizer = oss.OSS(model.parameters(), Counting, lr=0.1, momentum=0.0, where=where)
    sharded = oss.ShardedDataParallel(model, optimizer)
    train(sharded, optimizer, False, steps=4)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert [group["steps"] for group in optimizer.param_groups] == [4]
    assert optimizer.optim.steps == alone.steps


class Totalling(SGD):
    """Keeps a sum over all parameters in its groups, which parts of them do not have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["total"] = sum(float(p.grad.sum()) for p in group["params"] if p.grad is not None)
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("way", ["dear-layerwise", "oss", "bytescheduler", "dear-eager"])
def test_what_depends_on_the_parts_is_refused_by_name_on_every_rank(way: str) -> None:
    model = small_model()
    optimizer = WRAP[way](Totalling(model.parameters(), 0.1), model, elementwise=True)
    # One part has all; or it was seen that step() writes, and it updates everything.
    if way == "bytescheduler" or (dear.size() == 1 and way != "dear-layerwise"):
        train(model, optimizer, False, steps=3)
        return
    loss_of(model, 0, False).backward()
    with pytest.raises(RuntimeError, match=r"'total' of parameter group 0 came out as .* leave elementwise=True"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"Totalling\.step\(\) was called for some parameters at a time"):
        optimizer.step()


class CountingLate(SGD):
    """Begins to count after some steps."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        CountingLate.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    group.setdefault("late", CountingLate.calls) if CountingLate.calls > 2 else None
                    param.sub_(param.grad, alpha=group["lr"])


def test_what_is_written_late_in_deferred_updates_is_refused() -> None:
    CountingLate.calls = 0
    model = small_model()
    optimizer = WRAP["bytescheduler"](CountingLate(model.parameters(), 0.1), model, elementwise=True)
    with pytest.raises(RuntimeError, match=r"wrote 'late' of parameter group 0, which it did not in its first step"):
        train(model, optimizer, False, steps=4)


@torch.compile(backend="eager", fullgraph=True, dynamic=True)
def _moved(param: torch.Tensor, gradient: torch.Tensor) -> None:
    param.sub_(gradient, alpha=0.1)


class Compiled(SGD):
    """Has compiled its rule, for one parameter at a time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    _moved(param, param.grad)


@pytest.mark.parametrize("way", ["dear-layerwise", "oss", "bytescheduler"])
def test_an_optimizer_may_have_compiled_its_rule(way: str) -> None:
    as_in_one_process(way, train, Compiled, elementwise=True)


class Gathering(SGD):
    """Every rank updates some parameters and gathers the rest, as Muon's class for DistributedDataParallel does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
                self.share(param)

    @staticmethod
    def share(param: torch.Tensor) -> None:
        torch.distributed.broadcast(param, 0)


class GatheringByName(Gathering):
    @staticmethod
    def share(param: torch.Tensor) -> None:
        dear.broadcast_(param, 0, name="shared")


# A rank that was started alone has no group of torch.distributed's.
KINDS = [GatheringByName, *((Gathering,) if SIZE > 1 else ())]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["bytescheduler", "wfbp"])
def test_where_all_is_updated_inside_the_step_a_promise_changes_nothing(way: str, kind: type[Gathering]) -> None:
    model = small_model()
    optimizer = WRAP[way](kind(model.parameters(), 0.1), model, elementwise=True)
    train(model, optimizer, False, steps=3)
    optimizer.synchronize()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["dear-layerwise", "dear-eager", "dear-whole", "oss"])
def test_an_optimizer_that_communicates_is_refused_where_it_updates_parts(way: str, kind: type[Gathering]) -> None:
    model = small_model()
    optimizer = WRAP[way](kind(model.parameters(), 0.1), model, elementwise=True)
    loss_of(model, 0, False).backward()
    with pytest.raises(
        RuntimeError, match=r"\.step\(\) calls .*broadcast.*, an operation between ranks, and each rank"
    ):
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["dear-layerwise", "wfbp", "bytescheduler", "oss"])
def test_without_a_promise_it_communicates_as_it_likes(way: str, kind: type[Gathering]) -> None:
    model = small_model()
    optimizer = WRAP[way](kind(model.parameters(), 0.1), model)
    train(model, optimizer, False, steps=3)
    values = torch.cat([param.detach().flatten() for param in model.parameters()])
    assert all(torch.equal(values, other) for other in dear.allgather_object(values))
