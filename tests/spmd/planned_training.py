"""A job that plans its buckets by itself, with choices that a test has written down, and a clock that it sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dear
from overlap.optimizer import decision
from overlap.plan.choice import Choice, Job

__all__ = ["MIB", "STEPS", "Clock", "planned_job", "scripted", "train_steps"]

STEPS = 5  # a plan is made in this step's end
MIB = 2**20


def scripted(monkeypatch: pytest.MonkeyPatch, *settings: dict[str, float], seconds: float = 0.5) -> list[Job]:
    """Rank 0 chooses these, one after the other, for `seconds` instead of one. Returns what it was given."""
    left, seen = list(settings), []

    def choose(current: Any, preview: Any, job: Job, fits: Any, enough: Any) -> Choice:
        seen.append(job)
        setting = {**current.planned, **(left.pop(0) if left else {})}
        assert fits(preview(current.at(setting)))
        assert not enough()
        return Choice(setting, seconds, 1.0, 7)

    monkeypatch.setattr(decision, "choose", choose)
    return seen


class Clock:
    """Stands in for the time module where steps are timed."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def train_steps(
    model: torch.nn.Module, optimizer: Any, number: int, clock: Clock | None = None, took: float = 0.0
) -> None:
    """So many, each of which takes as long by rank 0's `clock`; by those of others, all take a second."""
    for _ in range(number):
        optimizer.zero_grad()
        if clock is not None:
            clock.now += took if dear.rank() == 0 else 1.0
        model(torch.full((4, 16), 1.0 + dear.rank())).square().mean().backward()
        optimizer.step()


def planned_job(**options: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(12)))
    return model, dear.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-3), model, **options)
