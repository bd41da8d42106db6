"""The random training scripts of `tests.fuzz`: that they say what they should, that they can fail, and some of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import dear
from tests.fuzz.__main__ import job_seconds, run, script_of
from tests.fuzz.script import End, Kind, Use, Zero, generate, smaller
from tests.fuzz.training import STRATEGIES, check

FEW, MANY, PARTS = 4, int(os.environ.get("DEAR_FUZZ_SEEDS", "80")), 2  # scripts of each job, in the two tiers
#: What has failed once: a call that drops nothing after clipping in the first iteration; gradients by hand in it after
#: model.zero_grad(); no gradient anywhere in a first step that clips; gradients of no_sync() alone that are dropped;
#: synchronize() where another rank has dropped a round unseen.
KEPT = [55, 365, 410, 25019, 100272]


def test_a_seed_makes_one_script() -> None:
    assert generate(7, 3) == generate(7, 3) != generate(8, 3)


def test_everything_comes_up() -> None:
    scripts = [generate(seed, 2) for seed in range(60)]
    steps = [step for script in scripts for step in script.steps]
    assert {step.end for step in steps} == set(End)
    assert {use for step in steps for uses in step.passes for use in uses} == set(Use)
    assert {change.kind for step in steps for change in step.changes} == set(Kind)
    assert {script.zero for script in scripts} == set(Zero)
    assert {len(step.passes) for step in steps} == {1, 2}
    assert any(step.by_hand for step in steps)


def test_what_is_updated_early_can_be() -> None:
    assert all(generate(seed, 2, plain=True).early for seed in range(60))
    assert not all(generate(seed, 2).early for seed in range(60))


def test_smaller_scripts_are_other_ones() -> None:
    script = generate(3, 2)
    assert all(other != script for other in smaller(script))
    assert any(len(other.steps) < len(script.steps) for other in smaller(script))


class _Doubled(torch.optim.SGD):
    """Makes too long a step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(2)
        return super().step(closure)


def test_what_differs_is_found() -> None:
    def wrap(plain: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> Any:
        doubled = _Doubled(plain.param_groups, lr=0.1, momentum=0.9)
        return dear.DistributedOptimizer(doubled, model, **options)

    script = next(s for s in (generate(seed, 1) for seed in range(50)) if not s.adam)
    dear.init()
    try:
        assert "differ from one process" in check(script, "wfbp", wrap)
        assert check(script, "wfbp") == ""
    finally:
        dear.shutdown()


JOBS = [("mpi", 2), ("torchrun", 2), ("mpi", 3)]
FAST = [JOBS[0], pytest.param(*JOBS[1], marks=pytest.mark.full), JOBS[2]]


def _run(launcher: str, ranks: int, seeds: list[int]) -> None:
    wrong = run(seeds, ranks, launcher, list(STRATEGIES))
    assert not wrong, "\n".join(
        f"{script_of(seed, ranks, name)}\n{name}: {text}" for (seed, name), text in wrong.items()
    )


def _seconds(seeds: int) -> float:
    """Of a test of so many, and those that are kept: also where a job deadlocks, and another one goes on behind it."""
    return job_seconds(len(STRATEGIES) * (len(KEPT) + seeds)) + 300


@pytest.mark.timeout(_seconds(FEW))
@pytest.mark.parametrize(("launcher", "ranks"), FAST)
def test_random_scripts(launcher: str, ranks: int) -> None:
    """Other seeds for each job: the strategies decide alike whoever carries their messages."""
    first = 1000 * JOBS.index((launcher, ranks))
    _run(launcher, ranks, list(range(first, first + FEW)))


@pytest.mark.full
@pytest.mark.timeout(_seconds(MANY // PARTS))
@pytest.mark.parametrize(("launcher", "ranks"), JOBS)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_scripts(launcher: str, ranks: int, part: int) -> None:
    first = 100_000 * (1 + JOBS.index((launcher, ranks))) + part * MANY // PARTS
    _run(launcher, ranks, [*(KEPT if part == 0 else []), *range(first, first + MANY // PARTS)])
