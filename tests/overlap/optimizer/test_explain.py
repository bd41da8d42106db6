"""What explain() says about jobs whose times are known, and what a picture of a simulated step has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from overlap.optimizer.explain import Explained, explanation, rows
from overlap.plan.simulation.events import Run, Span
from overlap.plan.simulation.network import Fitted
from overlap.plan.simulation.workload import Layer, Workload

MB = 2**20
NETWORK = Fitted(2, 1e-4, 0.2 / MB, 0.1 / MB)  # a reduction of a MB takes 200 ms, and a gathering 100


def _lines(
    forward: float = 0.1, simulate: Callable[[Workload, Fitted], Run] = lambda _work, _network: Run(1.0), **others: Any
) -> dict[str, str]:
    """What is said of a layer of a MB that takes `forward` seconds, and twice as many in backward."""
    told: dict[str, Any] = {
        "strategy": "dear",
        "ranks": 2,
        "setting": {"threshold_mb": 4.0},
        "buckets": 3,
        "whole": 0,
        "work": Workload((Layer("layer", forward + 0.25, 2 * forward + 0.5, (MB,)), Layer("around", 0.05, 0.0, ()))),
        "model": Workload((Layer("layer", forward, 2 * forward, (MB,)), Layer("around", 0.05, 0.0, ()))),
        "network": NETWORK,
        "computed": [0.3, 0.3],
        "hooks": 0.75,
        "issuing": 0.0025,
        "updates": 0.025,
        "before": 1.2,
        "again": False,
        "after": 1.05,
        "simulate": simulate,
    }
    text = explanation(Explained(**{**told, **others}))
    named = (line.strip().split("  ", 1) for line in text.splitlines()[1:])
    return {name: line.strip() for name, line in named}


@pytest.mark.parametrize(("forward", "bound"), [(0.05, "300 ms"), (0.08, "300 ms"), (0.2, "650 ms")])
def test_the_bound_is_the_longer_one_of_wire_and_the_models_own_computation(forward: float, bound: str) -> None:
    assert _lines(forward)["bound"].startswith(f"{bound}:")


def test_the_step_is_the_one_with_the_plan() -> None:
    assert _lines(after=0.6)["step"].startswith(
        "600 ms measured, 1.71 x the bound; 1,000 ms simulated; 1,200 ms before"
    )
    assert _lines(after=None)["step"] == "1,200 ms measured, 3.43 x the bound; 1,000 ms simulated"


def test_what_is_ours_is_no_computation_and_stands_in_one_line() -> None:
    lines = _lines(0.2)
    assert lines["computation"] == "650 ms: forward 200 ms, backward 400 ms, around them 50 ms"
    assert lines["overhead"] == (
        "752.5 ms: hooks, and copies of gradients, 750 ms; issuing and awaiting operations 2.5 ms"
    )
    assert lines["update"] == "25 ms: the optimizer, for what a rank updates"
    assert "hooks" not in lines["not hidden"]


def test_ddp_does_not_pay_for_our_hooks() -> None:
    ours, theirs = _lines(0.2)["others"], _lines(0.2, work=Workload((Layer("layer", 0.2, 0.4, (MB,)),)))["others"]
    ddp = "DDP 1,050 ms, simulated"
    assert ddp in ours
    assert ours.partition(";")[0] != theirs.partition(";")[0]  # wfbp pays


def test_the_newest_measurements_are_shown_and_said_to_be() -> None:
    kept = _lines(before=1.4, after=1.3, again=True)["step"]
    assert kept.endswith("; 1,400 ms without the plan, measured after it")
    assert kept.startswith("1,300 ms measured")
    taken_back = _lines(before=1.4, after=None, again=True)["step"]
    assert taken_back.startswith("1,400 ms measured")
    assert taken_back.endswith("; measured once more, as another plan was tried and was slower")


def test_a_start_is_that_of_both_operations_of_a_bucket() -> None:
    assert _lines()["network"] == "an all-reduce of the 1.0 MB of gradients takes 300 ms, and 200 us for each bucket"


@pytest.mark.parametrize(
    ("computed", "said"),
    [
        ([1.0, 1.04, 1.0], "the median computes for 1,000 ms, and none for much longer"),
        (
            [1.0, 0.0, 0.0, 1.2],  # two ranks had no batch
            "the median computes for 1,100 ms; longer: rank 3 (1,200 ms), for which all wait",
        ),
    ],
)
def test_late_ranks_are_named(computed: list[float], said: str) -> None:
    assert _lines(computed=computed)["ranks"] == said


def test_the_longest_waits_are_named() -> None:
    waits = {"all-gather 0": 0.001, "all-gather 1": 0.004, "reduce-scatter 0": 0.003, "reduce-scatter 1": 0.002}
    said = _lines(simulate=lambda _work, _network: Run(1.0, waits))["not hidden"]
    assert said == (
        "waits 10 ms (all-gather 1 4 ms, reduce-scatter 0 3 ms, reduce-scatter 1 2 ms, others 1 ms; 0 is nearest the "
        "input)"
    )


def test_what_would_help_is_simulated() -> None:
    def simulate(_work: Workload, network: Fitted) -> Run:
        return Run(0.5 + (network.reduce + network.gather) * MB)

    said = _lines(simulate=simulate)["would help"].split("; ")
    assert [line.rsplit(": ", 1)[1] for line in said] == ["700 ms", "650 ms", "500 ms"]  # instead of 800
    assert "bf16" in said[0]


def test_what_hardly_helps_is_not_said_to_help() -> None:
    def simulate(_work: Workload, network: Fitted) -> Run:
        return Run(0.99 if network.reduce < NETWORK.reduce else 1.0)

    assert _lines(simulate=simulate)["would help"] == "a faster computer: communication is hidden"


@pytest.mark.parametrize(("after", "difference"), [(1.05, None), (1.2, "200 ms of a step are not in the simulation")])
def test_a_step_that_is_longer_than_simulated_is_remarked_upon(after: float, difference: str | None) -> None:
    said = _lines(after=after).get("difference")
    assert said is None if difference is None else said is not None and said.startswith(difference)


@pytest.mark.parametrize(("strategy", "others"), [("dear", 3), ("bytescheduler_adapter", 2), ("wfbp", 2)])
def test_a_strategy_is_compared_with_the_others(strategy: str, others: int) -> None:
    said = _lines(strategy=strategy)["others"]
    assert said.count(" ms") == others
    assert strategy.partition("_")[0] not in said


def test_a_picture_has_a_row_for_each_lane() -> None:
    spans = [
        Span("gathers", "all-gather 0", 0.0, 0.5),
        Span("reductions, lane 1", "reduce-scatter 1", 0.25, 0.75),
        Span("thread", "wait reduce-scatter 1", 0.5, 0.75),
        Span("reductions", "reduce-scatter 0", 0.0, 1.0),
    ]
    found = rows(Run(1.0, {}, spans))
    assert [row.title for row in found] == ["computation", "reductions", "reductions, lane 1", "all-gathers"]
    assert [(bar.label, bar.kind, bar.start, bar.length) for row in found for bar in row.bars] == [
        ("wait RS 1", "wait", 500.0, 250.0),
        ("RS 0", "reduce_scatter", 0.0, 1000.0),
        ("RS 1", "reduce_scatter", 250.0, 500.0),
        ("AG 0", "all_gather", 0.0, 500.0),
    ]
