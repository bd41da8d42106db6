"""A timeline of real training: what each strategy communicates, on which rank, and that training is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
import pipe
from tests.spmd.models import MODELS
from tests.spmd.strategies import STRATEGIES


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    dear.stop_timeline()


def _train(strategy: str, path: Path | None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = MODELS["Mlp"]()
    optimizer = STRATEGIES[strategy](torch.optim.SGD(model.parameters(), 0.05), model)
    if path is not None:
        dear.start_timeline(path, mark_cycles=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 9), 1.0 + dear.rank())).square().mean().backward()
        optimizer.step()
    dear.stop_timeline()  # with the last all-gathers in flight
    return [parameter.detach().clone() for parameter in model.parameters()]


def _events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["dear", "wfbp"])
def test_every_rank_records_what_it_did(strategy: str, folder: Path) -> None:
    with_it = _train(strategy, folder / "trace-{rank}.json")
    without = _train(strategy, None)
    assert all(torch.equal(one, other) for one, other in zip(with_it, without, strict=True))
    dear.barrier()
    assert sorted(path.name for path in folder.iterdir()) == [f"trace-{rank}.json" for rank in range(dear.size())]
    events = _events(folder / f"trace-{dear.rank()}.json")
    assert {event["pid"] for event in events} == {dear.rank()}
    names = [event["name"] for event in events if event.get("cat") == "phase"]
    assert names == ["forward", "backward", "step"] * 3
    assert sum(event["ph"] == "i" for event in events) == 3
    expected = {"dear": {"reduce_scatter", "all_gather"}, "wfbp": {"all_reduce"}}[strategy]
    for kind in expected:
        bucketed = [event for event in events if event.get("cat") == kind and event["name"].startswith(f"{kind} b")]
        assert len(bucketed) % 3 == 0
        assert bucketed
        assert all(event["args"]["bytes"] > 0 for event in bucketed)


@pytest.mark.usefixtures("sets_of_a_test")
def test_micro_batches_of_a_pipeline_have_numbers(folder: Path) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(dear.size())))
    model = pipe.Pipe(
        layers,
        [1] * dear.size(),
        mesh=dear.Mesh(data=1, pipeline=-1),
        chunks=4,
        loss=lambda output, target: (output - target).square().mean(),
    )
    x = torch.ones(4, 3)
    model.step(x, target=x)  # torch makes a pass before it, in which it learns shapes
    dear.start_timeline(folder / "trace-{rank}.json")
    model.step(x, target=x)
    dear.stop_timeline()
    ahead = dear.size() - dear.rank()  # 1F1B: so many micro-batches go forward before one comes back
    wanted = [f"forward {number}" for number in range(ahead)]
    for number in range(4):
        wanted.append(f"backward {number}")
        if number + ahead < 4:
            wanted.append(f"forward {number + ahead}")
    events = _events(folder / f"trace-{dear.rank()}.json")
    assert [event["name"] for event in events if event.get("cat") == "phase"] == (
        wanted if dear.size() > 1 else [f"{way} {number}" for number in range(4) for way in ("forward", "backward")]
    )


def test_without_a_rank_in_the_path_rank_0_records(folder: Path) -> None:
    _train("dear", folder / "trace.json")
    dear.barrier()
    assert [path.name for path in folder.iterdir()] == ["trace.json"]
    assert {event["pid"] for event in _events(folder / "trace.json")} == {0}
    dear.barrier()  # all have looked: now there may be a picture
    if dear.rank() == 0:
        dear.draw_timeline(folder / "trace.json", folder / "trace.png")
        assert (folder / "trace.png").read_bytes()[:4] == b"\x89PNG"
