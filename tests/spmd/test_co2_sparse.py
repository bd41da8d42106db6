"""SparseLoCo is equal to a simulation of all workers in one process, bit for bit, at any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import co2
from tests.spmd.co2_simulated_rules import Sparse
from tests.spmd.co2_training import (
    adamw,
    assert_equal,
    equal_everywhere,
    loss_of,
    momentum_sgd,
    small_model,
    train_steps,
    wrapped,
)

RULE: dict[str, Any] = {"outer": "sparseloco", "outer_lr": 0.9, "top_k": 300}  # of 4096; one in 14


@pytest.mark.parametrize("bits", [2, None])
@pytest.mark.parametrize("overlap", [0, 2])
def test_equals_its_equations_on_one_process_bit_for_bit(overlap: int, bits: int | None) -> None:
    make = adamw if overlap else momentum_sgd
    options = {"overlap_steps": overlap, "mixing": 0.5} if overlap else {}
    model, optimizer = wrapped(make, **RULE, **options, bits=bits, outer_frequency=3)
    simulation = Sparse(small_model(), make, co2.size(), frequency=3, lr=0.9, top_k=300, bits=bits, overlap=overlap)
    for step in range(13):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
        assert_equal(model, simulation.workers[co2.rank()][0])
    assert co2.size() == 1 or not equal_everywhere(model), "in the middle of a round"
    if overlap == 0:
        train_steps(model, optimizer, range(13, 15))
        assert equal_everywhere(model)


def test_all_elements_as_they_are_and_no_feedback_to_speak_of_is_plain_averaging() -> None:
    model, optimizer = wrapped(outer="localsgd", outer_frequency=3)
    other, sparse = wrapped(outer="sparseloco", outer_frequency=3, top_k=4096, bits=None)
    train_steps(model, optimizer, range(6))
    train_steps(other, sparse, range(6))
    assert_equal(other, model, 1e-12)


def test_a_frozen_layer_stays_and_its_remainder_waits() -> None:
    model, optimizer = wrapped(**RULE, outer_frequency=2)
    train_steps(model, optimizer, range(4))
    left = optimizer.state_dict()["co2"]["parameters"][0]["residual"].clone()
    assert left.any()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    train_steps(model, optimizer, range(4, 8))
    assert torch.equal(model[0].weight, before)
    assert torch.equal(optimizer.state_dict()["co2"]["parameters"][0]["residual"], left)
    model[0].weight.requires_grad_(True)
    train_steps(model, optimizer, range(8, 10))
    assert not torch.equal(model[0].weight, before)
    assert equal_everywhere(model)


def test_an_average_is_of_all_elements() -> None:
    model, optimizer = wrapped(**RULE, outer_frequency=4)
    train_steps(model, optimizer, range(6))
    values = co2.allgather_object([param.detach().clone() for param in model.parameters()])
    optimizer.average_parameters()
    assert equal_everywhere(model)
    for param, column in zip(model.parameters(), zip(*values, strict=True), strict=True):
        torch.testing.assert_close(param.detach(), sum(column[1:], column[0]) / len(column), rtol=1e-12, atol=1e-12)


def test_what_is_explained_and_what_is_refused() -> None:
    model, optimizer = wrapped(**RULE, outer_frequency=2)
    with pytest.raises(RuntimeError, match="with outer='sparseloco' every round waits"):
        optimizer.explain()
    with pytest.raises(ValueError, match="outer='sparseloco' waits for the exchange"):
        co2.suggest_frequency(model)
    model, optimizer = wrapped(**RULE, outer_frequency=2, overlap_steps=2)
    train_steps(model, optimizer, range(8))
    assert "an all-gather of" in optimizer.explain()
    with pytest.raises(ValueError, match="top_k should be how many of 4096 elements travel, 1 to 4096, and is 5000"):
        wrapped(outer="sparseloco", top_k=5000)
    with pytest.raises(ValueError, match="bits should be 2 or None, for elements as they are, and is 4"):
        wrapped(outer="sparseloco", bits=4)
