"""Time to accuracy: tasks learn, and curves are compared step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.accuracy.curve import apart, draw, report, smooth
from bench.accuracy.tasks import TASKS

CURVES = {
    "dear": {"loss": [2.0, 1.0, 0.5], "seconds": [1.0, 2.0, 3.0]},
    "ddp": {"loss": [2.0, 1.001, 0.5], "seconds": [2.0, 4.0, 6.0]},
}


def test_the_digits_are_learned_in_a_few_steps() -> None:
    torch.manual_seed(1)
    task = TASKS["digits"]
    model, loss_of, generator = task.build(), task.loss(), torch.Generator().manual_seed(1)
    optimizer = task.optimizer(model.parameters(), **task.arguments)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = loss_of(model, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert smooth(losses)[-1] < 0.5 * losses[0]


def test_curves_are_compared_at_the_same_step(tmp_path: Path) -> None:
    assert apart(CURVES) == pytest.approx(0.001)
    assert smooth([1, 2, 3, 4, 5, 6, 7]) == [1, 1.5, 2, 2.5, 3, 4, 5]
    lines = report(CURVES).splitlines()
    assert lines[1].split() == ["dear", "1.1667", "3.0", "0.50"]
    assert "at most 0.001 apart, over 3 steps" in lines[-1]
    draw(CURVES, "a title", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000
