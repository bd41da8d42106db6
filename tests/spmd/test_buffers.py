"""Buffers of the model are the same on all ranks after every step, as under DDP: those of the first rank that trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import dear
from overlap.features.buffers import BroadcastBuffers
from overlap.transport.communicator import Communicator, Work
from tests.spmd.listening import heard
from tests.spmd.strategies import WRAP

WAYS = ["dear", "dear-eager", "oss", "wfbp", "mgwfbp", "bytescheduler"]


def _model() -> nn.Sequential:
    torch.default_generator.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def _wrapped(model: nn.Module, way: str = "dear", **options: Any) -> Any:
    return WRAP[way](torch.optim.SGD(model.parameters(), 0.1), model, **options)


def _forward(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dear.rank())
    return model(torch.randn(5, 6, generator=generator, dtype=torch.float64) + dear.rank()).square().mean()


def _buffers(model: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.flatten().tolist() for name, buffer in model.named_buffers()}


def _everywhere(model: nn.Module) -> list[dict[str, list[float]]]:
    return dear.allgather_object(_buffers(model))


@contextmanager
def _sent() -> Iterator[list[int]]:
    """How many bytes each broadcast of buffers carries."""
    found: list[int] = []

    def listener(_comm: Communicator, work: Work) -> Work:
        if work.label == "buffers":
            found.append(work.nbytes)
        return work

    Communicator.listener = listener
    try:
        yield found
    finally:
        Communicator.listener = None


@pytest.mark.parametrize("way", WAYS)
def test_after_a_step_all_ranks_have_rank_0s(way: str) -> None:
    model = _model()
    optimizer = _wrapped(model, way)
    for step in range(4):
        optimizer.zero_grad()
        _forward(model, step).backward()
        before = _everywhere(model)
        if dear.size() > 1:
            assert before[0] != before[1]  # of what each rank has seen
        optimizer.step()
        assert _everywhere(model) == [before[0]] * dear.size()
    assert _buffers(model)["1.num_batches_tracked"] == [4]


def test_a_skipped_step_and_accumulation_leave_them_to_the_next_step() -> None:
    model = _model()
    optimizer = _wrapped(model)
    _forward(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    _forward(model, 1).backward()
    optimizer.zero_grad()
    with optimizer.no_sync():
        _forward(model, 2).backward()
    _forward(model, 3).backward()
    before = _everywhere(model)
    optimizer.step()
    assert _everywhere(model) == [before[0]] * dear.size()


def test_they_stay_each_ranks_own_without() -> None:
    model = _model()
    optimizer = _wrapped(model, broadcast_buffers=False)
    with _sent() as sent:
        _forward(model, 0).backward()
        before = _buffers(model)
        optimizer.step()
    assert _buffers(model) == before
    assert not sent


def test_constants_do_not_travel_and_what_changes_later_does() -> None:
    model = _model()
    model.register_buffer("mask", torch.ones(1000))
    model[1].eval()
    optimizer = _wrapped(model)
    told = []
    for step in range(4):
        if step == 2 and dear.rank() == dear.size() - 1:
            model[1].train()  # on one rank: which all hear of
        optimizer.zero_grad()
        _forward(model, step).backward()
        with _sent() as sent:
            optimizer.step()
        told.append(sum(sent))
        assert len({str(buffers) for buffers in _everywhere(model)}) == 1
    if dear.size() > 1:
        assert told[:2] == [0, 0]
        assert 0 < told[2] == told[3] <= 3 * 64


def test_what_begins_to_change_late_and_without_a_version_is_found() -> None:
    """Contents are looked at in steps 0, 1, 2, 4, 8, …"""
    model = _model()
    model.register_buffer("seen", torch.zeros(3))
    optimizer = _wrapped(model)
    for step in range(10):
        if step > 5:
            model.seen.data.add_(1 + dear.rank())  # type: ignore[union-attr, operator]
        optimizer.zero_grad()
        _forward(model, step).backward()
        optimizer.step()
        if step >= 8:
            assert model.seen.tolist() == [step - 5.0] * 3  # type: ignore[operator, union-attr]


def test_buffers_that_are_replaced_or_converted_travel() -> None:
    model = _model()
    model.register_buffer("seen", torch.zeros(3))
    optimizer = _wrapped(model)
    for step in range(3):
        if step == 1:
            model[1].running_mean = torch.full((4,), 3.0 + dear.rank(), dtype=torch.float64)
        if step == 2:
            model.seen = model.seen.long() + dear.rank()  # type: ignore[operator]
        model.seen.data.add_(1 + dear.rank())  # type: ignore[union-attr, operator]  # of which no version tells
        optimizer.zero_grad()
        _forward(model, step).backward()
        optimizer.step()
        assert len({str(buffers) for buffers in _everywhere(model)}) == 1
    assert model.seen.tolist() == [3, 3, 3]  # type: ignore[operator, union-attr]


def test_buffers_that_differ_in_shape_stay_each_ranks_own() -> None:
    model = _model()
    optimizer = _wrapped(model)
    model.register_buffer("cache", torch.zeros(2 + dear.rank()))
    with heard(logging.WARNING) as said:
        for step in range(3):
            optimizer.zero_grad()
            _forward(model, step).backward()
            model.cache += 1  # type: ignore[operator]
            optimizer.step()
    told = [text for text in said if "differ between ranks in shape" in text]
    assert len(told) == (1 if dear.size() > 1 and dear.rank() == 0 else 0)
    mine = _buffers(model)
    assert mine.pop("cache") == [3.0] * (2 + dear.rank())
    assert all(other["1.running_mean"] == mine["1.running_mean"] for other in _everywhere(model))


def test_where_rank_0_has_joined_the_next_one_gives_them() -> None:
    model = _model()
    optimizer = _wrapped(model)
    steps = 2 if dear.rank() == 0 else 3
    for step in range(steps):
        optimizer.zero_grad()
        _forward(model, step).backward()
        last = _buffers(model)
        optimizer.step()
    dear.join()
    giver = min(1, dear.size() - 1)
    assert _everywhere(model) == [dear.broadcast_object(last, giver)] * dear.size()


def test_modules_that_are_replaced_or_added_bring_their_own() -> None:
    model = nn.Sequential(
        nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ).double()
    optimizer = _wrapped(model)
    for step in range(8):
        if step == 2:
            model[2] = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
            optimizer.add_param_group({"params": list(model[2].parameters())})
        if step == 5:
            model[1] = nn.BatchNorm1d(4, affine=False).double()  # has nothing that is trained
        optimizer.zero_grad()
        _forward(model, step).backward()
        optimizer.step()
        assert len({str(buffers) for buffers in _everywhere(model)}) == 1, step


def test_what_a_script_changes_after_clipping_stays() -> None:
    model = _model()
    model.register_buffer("seen", torch.zeros(3))
    optimizer = _wrapped(model)
    for step in range(4):
        optimizer.zero_grad()
        _forward(model, step).backward()
        optimizer.clip_grad_norm_(1.0)
        model.seen += 1  # type: ignore[operator]
        optimizer.step()
    assert model.seen.tolist() == [4, 4, 4]  # type: ignore[operator, union-attr]


def test_a_buffer_whose_elements_share_memory_travels() -> None:
    model = _model()
    one = torch.zeros(1)
    model.register_buffer("seen", one.expand(3))
    optimizer = _wrapped(model)
    for step in range(3):
        optimizer.zero_grad()
        _forward(model, step).backward()
        one += 1 + dear.rank()
        optimizer.step()
        assert model.seen.tolist() == [step + 1.0] * 3  # type: ignore[operator, union-attr]


def test_a_shape_that_changes_all_the_time_is_agreed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    model.register_buffer("cache", torch.zeros(1))
    optimizer = _wrapped(model)
    agreed = []
    plain = BroadcastBuffers._agree
    monkeypatch.setattr(BroadcastBuffers, "_agree", lambda self: (agreed.append(0), plain(self)))
    for step in range(6):
        optimizer.zero_grad()
        _forward(model, step).backward()
        model.cache = torch.zeros(1 + (step + dear.rank()) % 3)
        optimizer.step()
    assert len(agreed) <= 2
