"""SparseLoCo is equal to a simulation of all workers in one process, bit for bit, at any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import co2
from co2.fragments.sparse_codec import SparseCodec
from tests.spmd.co2_simulation import Simulation
from tests.spmd.co2_training import _adamw, _equal, _everywhere, _loss, _model, _momentum, _steps, _wrapped

RULE: dict[str, Any] = {"outer": "sparseloco", "outer_lr": 0.9, "top_k": 300}  # of 4096; one in 14


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


@pytest.mark.parametrize("bits", [2, None])
@pytest.mark.parametrize("overlap", [0, 2])
def test_equals_its_equations_on_one_process_bit_for_bit(overlap: int, bits: int | None) -> None:
    make = _adamw if overlap else _momentum
    options = {"overlap_steps": overlap, "mixing": 0.5} if overlap else {}
    model, optimizer = _wrapped(make, **RULE, **options, bits=bits, outer_frequency=3)
    simulation = Sparse(_model(), make, co2.size(), frequency=3, lr=0.9, top_k=300, bits=bits, overlap=overlap)
    for step in range(13):
        _steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: _loss(m, worker, step))
        _equal(model, simulation.workers[co2.rank()][0])
    assert co2.size() == 1 or not _everywhere(model), "in the middle of a round"
    if overlap == 0:
        _steps(model, optimizer, range(13, 15))
        assert _everywhere(model)


def test_all_elements_as_they_are_and_no_feedback_to_speak_of_is_plain_averaging() -> None:
    model, optimizer = _wrapped(outer="localsgd", outer_frequency=3)
    other, sparse = _wrapped(outer="sparseloco", outer_frequency=3, top_k=4096, bits=None)
    _steps(model, optimizer, range(6))
    _steps(other, sparse, range(6))
    _equal(other, model, 1e-12)


def test_a_frozen_layer_stays_and_its_remainder_waits() -> None:
    model, optimizer = _wrapped(**RULE, outer_frequency=2)
    _steps(model, optimizer, range(4))
    left = optimizer.state_dict()["co2"]["parameters"][0]["residual"].clone()
    assert left.any()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    _steps(model, optimizer, range(4, 8))
    assert torch.equal(model[0].weight, before)
    assert torch.equal(optimizer.state_dict()["co2"]["parameters"][0]["residual"], left)
    model[0].weight.requires_grad_(True)
    _steps(model, optimizer, range(8, 10))
    assert not torch.equal(model[0].weight, before)
    assert _everywhere(model)


def test_an_average_is_of_all_elements() -> None:
    model, optimizer = _wrapped(**RULE, outer_frequency=4)
    _steps(model, optimizer, range(6))
    values = co2.allgather_object([param.detach().clone() for param in model.parameters()])
    optimizer.average_parameters()
    assert _everywhere(model)
    for param, column in zip(model.parameters(), zip(*values, strict=True), strict=True):
        torch.testing.assert_close(param.detach(), sum(column[1:], column[0]) / len(column), rtol=1e-12, atol=1e-12)


def test_what_is_explained_and_what_is_refused() -> None:
    model, optimizer = _wrapped(**RULE, outer_frequency=2)
    with pytest.raises(RuntimeError, match="with outer='sparseloco' every round waits"):
        optimizer.explain()
    with pytest.raises(ValueError, match="outer='sparseloco' waits for the exchange"):
        co2.suggest_frequency(model)
    model, optimizer = _wrapped(**RULE, outer_frequency=2, overlap_steps=2)
    _steps(model, optimizer, range(8))
    assert "an all-gather of" in optimizer.explain()
    with pytest.raises(ValueError, match="top_k should be how many of 4096 elements travel, 1 to 4096, and is 5000"):
        _wrapped(outer="sparseloco", top_k=5000)
    with pytest.raises(ValueError, match="bits should be 2 or None, for elements as they are, and is 4"):
        _wrapped(outer="sparseloco", bits=4)
