"""A timeline of real training: what each strategy communicates, on which rank, and that training is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
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


def test_without_a_rank_in_the_path_rank_0_records(folder: Path) -> None:
    _train("dear", folder / "trace.json")
    dear.barrier()
    assert [path.name for path in folder.iterdir()] == ["trace.json"]
    assert {event["pid"] for event in _events(folder / "trace.json")} == {0}
    dear.barrier()  # all have looked: now there may be a picture
    if dear.rank() == 0:
        dear.draw_timeline(folder / "trace.json", folder / "trace.png")
        assert (folder / "trace.png").read_bytes()[:4] == b"\x89PNG"
