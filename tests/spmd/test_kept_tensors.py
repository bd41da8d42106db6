"""A tensor over a parameter's memory that a script keeps across step(): final values, and one word on what it costs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import dear
from tests.spmd.listening import heard
from tests.spmd.one_process import SGD, small_model, train
from tests.spmd.strategies import WRAP

WAYS = ("dear", "dear-layerwise", "dear-rb", "dear-eager", "wfbp", "mgwfbp", "bytescheduler", "oss")
WAITS = "step() waits for the new values"
OLD = "shows old values from now on"


@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_shows_final_values_after_every_step(way: str) -> None:
    """After one step, over the weights that the next forward needs last."""
    reference, model = small_model(), small_model()
    plain = SGD(reference.parameters(), 0.1, momentum=0.9)
    optimizer = WRAP[way](SGD(model.parameters(), 0.1, momentum=0.9), model)
    kept: Any = None
    with heard(logging.WARNING) as said:
        for step in range(5):
            train(reference, plain, True, steps=1, first=step)
            train(model, optimizer, False, steps=1, first=step)
            if kept is not None:
                torch.testing.assert_close(kept, reference[2].weight.detach(), rtol=1e-9, atol=1e-12)
            if step == 0:
                kept = model[2].weight.data
    later = way not in ("wfbp", "mgwfbp") and (dear.size() > 1 or way == "bytescheduler")
    assert sum(WAITS in text for text in said) == int(later and dear.rank() == 0)
    assert not any(OLD in text for text in said)


@pytest.mark.parametrize("way", [*WAYS, "exact"])
def test_who_keeps_nothing_waits_for_nothing(way: str) -> None:
    model = small_model()
    optimizer: Any = SGD(model.parameters(), 0.1, momentum=0.9)
    if way == "exact":
        model = model.float()
        optimizer = dear.DistributedOptimizer(optimizer, model, gather_dtype=torch.bfloat16)
    else:
        optimizer = WRAP[way](optimizer, model)
    with heard(logging.WARNING) as said:
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 6, dtype=next(model.parameters()).dtype)
            loss = model(x).square().mean()
            loss.backward()
            if step == 3 and way != "dear-eager":
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            assert not optimizer._engine.transit.held
            if step == 2:
                optimizer.state_dict()
                model.state_dict()
            if step == 4 and way in ("dear", "oss"):
                optimizer.replan(optimizer.strategy)
    assert not any(WAITS in text or OLD in text for text in said)


@pytest.mark.parametrize("way", ["dear", "oss"])
def test_what_outlives_a_buckets_memory_is_told(way: str) -> None:
    model: Any = small_model()
    kept = [model[2].weight.data]  # before the first step
    optimizer = WRAP[way](SGD(model.parameters(), 0.1), model)
    with heard(logging.WARNING) as said:
        train(model, optimizer, False)
    assert sum(OLD in text for text in said) == int(dear.rank() == 0)
    model = small_model()
    optimizer = WRAP[way](SGD(model.parameters(), 0.1), model)
    train(model, optimizer, False)
    kept.append(model[2].weight.data)
    with heard(logging.WARNING) as said:
        optimizer.replan(optimizer.strategy)
        train(model, optimizer, False)
    assert sum(OLD in text for text in said) == int(dear.rank() == 0)
