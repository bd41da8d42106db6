"""Time to accuracy: tasks learn, and curves are compared step by step."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from bench.accuracy.__main__ import earlier, main
from bench.accuracy.curve import apart, draw, report, smooth
from bench.accuracy.report import markdown, mean_and_spread, seconds_to, steps_to, targets
from bench.accuracy.tasks import TASKS, warm_up_and_cosine

CURVES = {
    "dear": {"loss": [2.0, 1.0, 0.5], "seconds": [1.0, 2.0, 3.0]},
    "ddp": {"loss": [2.0, 1.001, 0.5], "seconds": [2.0, 4.0, 6.0]},
}


@pytest.mark.parametrize("name", ["digits", "cnn"])
def test_the_digits_are_learned_in_a_few_steps(name: str) -> None:
    torch.manual_seed(1)
    task = TASKS[name]
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
    if task.held_out is not None:
        found = task.held_out(model)
        assert found["accuracy"] > 0.6
        assert found["loss"] < losses[0]


@pytest.mark.full
def test_the_language_has_a_loss_on_text_that_was_held_out() -> None:
    torch.manual_seed(1)
    task = TASKS["language"]
    with torch.no_grad():
        assert task.held_out is not None
        assert task.held_out(task.build())["loss"] == pytest.approx(
            4.85, abs=0.3
        )  # of 128 bytes, one as likely as another


def test_a_learning_rate_rises_and_falls() -> None:
    rates = [warm_up_and_cosine(step, 1000) for step in range(1001)]
    assert rates[:2] == [0.01, 0.02]
    assert rates[99] == rates[100] == max(rates) == 1.0
    assert rates[550] == pytest.approx(0.55)
    assert rates[1000] == pytest.approx(0.1)  # a scheduler computes one more than there are steps
    assert warm_up_and_cosine(0, 1) == 1.0


def test_losses_are_timed_and_averaged_over_seeds() -> None:
    falling = [4.0 - step / 50 for step in range(100)]
    runs = [
        {"loss": falling, "seconds": [0.5 * step for step in range(100)], "held_out": {"loss": 2.0, "accuracy": 0.9}},
        {"loss": falling, "seconds": [1.5 * step for step in range(100)], "held_out": {"loss": 3.0, "accuracy": 0.8}},
    ]
    slow = [{**runs[0], "loss": [4.0] * 100, "held_out": {"loss": 2.75, "accuracy": 0.5}}]
    assert mean_and_spread([2.0, 3.0]) == pytest.approx((2.5, 0.7071), rel=1e-3)
    assert mean_and_spread([2.0]) == (2.0, 0.0)
    assert targets(runs) == pytest.approx([4.0 - 12 / 50, 4.0 - 37 / 50, 4.0 - 87 / 50])
    assert seconds_to(runs[0], targets(runs)[1]) == pytest.approx(0.5 * 49)
    assert seconds_to(slow[0], 3.0) is None
    assert steps_to(runs[0], targets(runs)[1]) == 50
    assert steps_to(slow[0], targets(runs)[1]) is None
    counted = markdown("About it.", {"dear": runs, "co2": slow}, timed=False)
    assert "Steps to a training loss" in counted
    assert "| dear | 25 ± 0 | 50 ± 0 | 100 ± 0 |" in counted
    text = markdown("About it.", {"dear": runs, "co2": slow}, timed=True)
    assert "| dear | 2.5000 ± 0.7071 | 85.0 ± 7.1 | +0.0% |" in text
    assert "| co2 | 2.7500 | 50.0 | +10.0% |" in text
    assert "| co2 | never | never | never | 100 | 49.5 |" in text


def test_curves_are_compared_at_the_same_step(tmp_path: Path) -> None:
    assert apart(CURVES) == pytest.approx(0.001)
    assert smooth([1, 2, 3, 4, 5, 6, 7]) == [1, 1.5, 2, 2.5, 3, 4, 5]
    lines = report(CURVES).splitlines()
    assert lines[1].split() == ["dear", "1.1667", "3", "3.0", "0.50"]
    assert "at most 0.001 apart, over 3 steps" in lines[-1]
    draw(CURVES, "a title", tmp_path / "x.png", timed=True)
    draw(CURVES, "a title", tmp_path / "y.png", timed=False)
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_methods_may_make_as_many_steps_as_fit_in_the_same_time(tmp_path: Path) -> None:
    more = {**CURVES, "co2": {"loss": [2.5, 2.0, 0.4, 0.3], "seconds": [0.5, 1.0, 1.5, 2.0]}}
    assert apart(more) == pytest.approx(1.0)  # at the second step
    assert "co2                                             1.3000      4      2.0        0.33" in report(more)
    assert report(more).endswith("over 3 steps")
    draw(more, "a title", tmp_path / "x.png", timed=True)
    there = tmp_path / "curves.json"
    there.write_text(json.dumps({name: {**curve, "origin": {}, "runs": [curve]} for name, curve in more.items()}))
    asked = {"steps": 4, "methods": ["co2"], "network": "100mbit", "output": tmp_path / "curves.png"}
    assert earlier(Namespace(**asked)).keys() == more.keys()
    for others in ({"network": "local"}, {"methods": ["co2", "dear"]}):
        with pytest.raises(ValueError, match="3 steps of dear, and --steps 4 is asked for: pass --steps 3"):
            earlier(Namespace(**{**asked, **others}))


def test_seeds_that_a_method_lacks_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def run(spec: str, seed: int, *_: object) -> dict[str, object]:
        asked.append((spec, seed))
        return {**CURVES["dear"], "seed": seed, "origin": {"commit": f"abc{seed}"}}

    monkeypatch.setattr("bench.accuracy.__main__.run", run)
    monkeypatch.setattr("bench.accuracy.__main__.end_in_order", lambda: None)  # signals stay pytest's
    output = tmp_path / "x.png"
    command = ["bench.accuracy", "--task", "language", "--steps", "3", "--output", str(output), "--methods", "dear"]
    for more in (["ddp"], ["--seeds", "3", "--add"]):
        monkeypatch.setattr(sys, "argv", command + more)
        assert main() == 0
        there = json.loads(output.with_suffix(".json").read_text())
        there["dear"]["runs"][0].pop("origin")  # as files of earlier versions are
        output.with_suffix(".json").write_text(json.dumps(there))
    assert asked == [("dear", 1), ("ddp", 1), ("dear", 2), ("dear", 3)]
    assert (there["dear"]["origin"], [run["seed"] for run in there["dear"]["runs"]]) == ({"commit": "abc1"}, [1, 2, 3])
    assert "language, 2 workers, local; 3 steps, 1 to 3 seeds." in output.with_suffix(".md").read_text()
