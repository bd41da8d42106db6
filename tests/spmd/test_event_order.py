"""The order in which every strategy issues its operations: literal lists of what a small model's steps do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import bytescheduler_adapter
import co2
import dear
import mgwfbp
import oss
import wfbp
from tests.spmd.models import WIDTH
from tests.spmd.recorder import Recorder, Three
from tests.spmd.strategies import as_early_as_possible
from tests.spmd_plugin import SIZE

TIMES = {"end.weight": 1.0, "mid.weight": 0.0, "inp.weight": 1.0}  # the first two gradients come at once
WRAP: dict[str, Callable[..., Any]] = {
    "dear": lambda o, m: dear.DistributedOptimizer(o, m, threshold_mb=0),
    "dear-eager": lambda o, m: as_early_as_possible(dear.DistributedOptimizer(o, m, threshold_mb=0, eager=True)),
    "dear-rb": lambda o, m: dear.DistributedOptimizer(o, m, threshold_mb=0, policy="rb"),
    "wfbp": wfbp.DistributedOptimizer,
    "mgwfbp": lambda o, m: mgwfbp.DistributedOptimizer(o, m, alpha_beta=(1e-3, 0.0), layerwise_times=TIMES),
    "oss": lambda o, m: oss.DistributedOptimizer(o, m, threshold_mb=0),
    "bytescheduler": lambda o, m: bytescheduler_adapter.DistributedOptimizer(
        o, m, partition_mb=0.0004, credit_mb=0.0001
    ),
    "co2": lambda o, m: co2.DistributedOptimizer(o, m, outer_frequency=2, nprocs_per_node=min(2, SIZE)),
}
ODD = 1 if SIZE > 1 else 0  # the lane of parameters that rank 1 owns
TALLY = ["all_reduce step()"] if SIZE > 1 else []  # to which all ranks come before anything is updated
SYNCHRONIZE = ["all_reduce synchronize()"] if SIZE > 1 else []
USED = ["all_reduce used parameters"] if SIZE > 1 else []  # asked where no rank has every gradient
BACKWARD = ["gradient end", "gradient mid", "gradient inp"]
#: What ranks tell each other once: what the first iteration taught, whether their data is the same, and gradients sparse.
LEARNED = ["all_gather", "all_gather", "all_gather"] if SIZE > 1 else []
#: Of the first step, which learns, and of the second.
EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "dear": (
        [
            *BACKWARD,
            "step",
            *TALLY,
            *LEARNED,
            "reduce_scatter end",
            "reduce_scatter mid",
            "reduce_scatter inp",
            "all_gather inp",
            "all_gather mid",
            "all_gather end",
        ],
        [
            "gradient end",
            "reduce_scatter end",
            "gradient mid",
            "reduce_scatter mid",
            "gradient inp",
            "step",
            *TALLY,
            "reduce_scatter inp",
            "all_gather inp",
            "all_gather mid",
            "all_gather end",
        ],
    ),
    "dear-eager": (
        [
            *BACKWARD,
            "step",
            *TALLY,
            *LEARNED,
            "reduce_scatter end",
            "reduce_scatter mid",
            "reduce_scatter inp",
            "all_gather end",
            "all_gather mid",
            "all_reduce early updates",
            "all_gather inp",
        ],
        [
            "gradient end",
            "reduce_scatter end",
            "gradient mid",
            "all_gather end",
            "reduce_scatter mid",
            "gradient inp",
            "step",
            *TALLY,
            "reduce_scatter inp",
            "all_gather mid",
            "all_reduce early updates",
            "all_gather inp",
        ],
    ),
    "dear-rb": (
        [
            *BACKWARD,
            "step",
            *TALLY,
            *LEARNED,
            "reduce end",
            "reduce mid",
            "reduce inp",
            "broadcast inp",
            "broadcast mid",
            "broadcast end",
        ],
        [
            "gradient end",
            "reduce end",
            "gradient mid",
            "reduce mid",
            "gradient inp",
            "step",
            *TALLY,
            "reduce inp",
            "broadcast inp",
            "broadcast mid",
            "broadcast end",
        ],
    ),
    "wfbp": (
        [
            *BACKWARD,
            "step",
            *TALLY,
            *LEARNED,
            "all_reduce end",
            "all_reduce mid",
            "all_reduce inp",
        ],
        [
            "gradient end",
            "all_reduce end",
            "gradient mid",
            "all_reduce mid",
            "gradient inp",
            "all_reduce inp",
            "step",
            *TALLY,
        ],
    ),
    "mgwfbp": (
        [
            *BACKWARD,
            "step",
            *TALLY,
            *LEARNED,
            "all_reduce end+mid",
            "all_reduce inp",
        ],
        [
            "gradient end",
            "gradient mid",
            "all_reduce end+mid",
            "gradient inp",
            "all_reduce inp",
            "step",
            *TALLY,
        ],
    ),
    "oss": (
        [
            *BACKWARD,
            "step",
            *TALLY,
            *(f"{each} on lane 0" for each in LEARNED),
            f"reduce_scatter end on lane {ODD}",
            "reduce_scatter mid on lane 0",
            "reduce_scatter inp on lane 0",
            "all_gather inp on lane 0",
            "all_gather mid on lane 0",
            f"all_gather end on lane {ODD}",
        ],
        [
            "gradient end",
            f"reduce_scatter end on lane {ODD}",
            "gradient mid",
            "reduce_scatter mid on lane 0",
            "gradient inp",
            "step",
            *TALLY,
            "reduce_scatter inp on lane 0",
            "all_gather inp on lane 0",
            "all_gather mid on lane 0",
            f"all_gather end on lane {ODD}",
        ],
    ),
}


def _made(
    strategy: str, frozen: Sequence[str] = (), inner: tuple[int, int] = (WIDTH, WIDTH)
) -> tuple[Three, Any, Recorder]:
    torch.manual_seed(3)
    model = Three(inner)
    recorder = Recorder(model)
    for layer in frozen:
        model.get_submodule(layer).requires_grad_(False)
    return model, WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1), model), recorder


@pytest.mark.parametrize("strategy", EXPECTED)
def test_two_steps(strategy: str) -> None:
    _, optimizer, recorder = _made(strategy)
    first, second = recorder.step(optimizer), recorder.step(optimizer)
    assert first == EXPECTED[strategy][0]
    assert second == EXPECTED[strategy][1]


def test_parameters_unfrozen_one_after_the_other_are_reduced_under_backward() -> None:
    for strategy in ("dear", "wfbp"):
        model, optimizer, recorder = _made(strategy, frozen=("inp", "mid"))
        recorder.step(optimizer)
        for layer in (model.mid, model.inp):
            layer.requires_grad_(True)
            recorder.step(optimizer)
        assert recorder.step(optimizer) == EXPECTED[strategy][1]


def test_a_parameter_added_later_is_reduced_under_backward() -> None:
    model = Three()
    recorder = Recorder(model)
    inner = torch.optim.SGD([*model.end.parameters(), *model.mid.parameters()], 0.1)
    optimizer = wfbp.DistributedOptimizer(inner, model)
    recorder.step(optimizer)
    optimizer.add_param_group({"params": list(model.inp.parameters())})
    recorder.step(optimizer)
    assert recorder.step(optimizer) == EXPECTED["wfbp"][1]


def test_what_was_unused_at_first_is_awaited_as_often_as_what_was_used_most() -> None:
    _, optimizer, recorder = _made("wfbp")
    recorder.passes = [("mid", "end")] * 2
    recorder.step(optimizer)
    recorder.passes = [("inp", "mid", "end")] * 2
    assert recorder.step(optimizer) == [*BACKWARD, *EXPECTED["wfbp"][1]]


def test_each_parameter_is_awaited_as_often_as_it_was_used() -> None:
    """Neither less often, nor as often as another one."""
    _, optimizer, recorder = _made("wfbp")
    recorder.passes = [("inp", "mid", "end"), ("mid", "end")]
    recorder.step(optimizer)
    assert recorder.step(optimizer) == [
        "gradient end",
        "gradient mid",
        "gradient inp",
        "all_reduce inp",
        "gradient end",
        "all_reduce end",
        "gradient mid",
        "all_reduce mid",
        "step",
        *TALLY,
    ]


def test_two_rounds_of_co2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two steps each; a bucket, and a part, for every layer."""
    monkeypatch.setattr("co2.optimizer._FUSION_BYTES", 1)
    monkeypatch.setattr("co2.part._FUSION_BYTES", 1)
    _, optimizer, recorder = _made("co2", inner=(8 * SIZE, 5))
    assert recorder.step(optimizer) == [
        *BACKWARD,
        "step",
        *TALLY,
        *LEARNED,
        "all_reduce end",
        "all_reduce mid",
        "all_reduce inp",
    ]
    local = EXPECTED["wfbp"][1]
    whole = [
        *local,
        "all_reduce co2 round",
        "reduce_scatter co2 average of mid",
        "reduce_scatter co2 average of end",
        "reduce_scatter co2 average of inp",
        "all_reduce co2 gap",
        "all_gather co2 gather of mid",
        "all_gather co2 gather of end",
        "all_gather co2 gather of inp",
    ]
    assert [recorder.step(optimizer) for _ in range(3)] == [whole, local, whole]


def _operations(recorder: Recorder, optimizer: Any) -> list[str]:
    """Another thread issues them, at any time between gradients and what follows a tally."""
    events = recorder.events(optimizer)
    calls = (*TALLY, *SYNCHRONIZE, *USED)
    return [event for event in events if not event.startswith("gradient") and event not in calls]


def test_two_steps_of_bytescheduler() -> None:
    """While rank 0 is held back at the first partition, all others become ready."""
    model, optimizer, recorder = _made("bytescheduler")
    with recorder.listening():
        recorder.hold("b0.0")
        recorder.backward(optimizer)
        optimizer.step()
        recorder.release()
        optimizer.synchronize()
    assert _operations(recorder, optimizer) == [
        *LEARNED,
        "all_reduce inp.0",
        "all_reduce inp.1",
        "all_reduce mid.0",
        "all_reduce mid.1",
        "all_reduce end.0",
        "all_reduce end.1",
    ]
    model.mid.weight.register_hook(lambda _: recorder.await_hold())
    with recorder.listening():
        recorder.hold("b2.0")
        recorder.backward(optimizer)
        optimizer.step()
        recorder.release()
        optimizer.synchronize()
    assert _operations(recorder, optimizer) == [
        "all_reduce end.0",
        "all_reduce inp.0",
        "all_reduce inp.1",
        "all_reduce mid.0",
        "all_reduce mid.1",
        "all_reduce end.1",
    ]


def test_no_step_of_bytescheduler_overtakes_another() -> None:
    """The last layer's partitions still wait for their turn when gradients of the next step, more urgent, are there."""
    _, optimizer, recorder = _made("bytescheduler")
    with recorder.listening():
        recorder.hold("b2.0")
        recorder.backward(optimizer)
        optimizer.step()
        recorder.await_hold()
        recorder.passes = [("inp", "mid")]  # so that nobody waits for the last layer
        recorder.backward(optimizer)
        recorder.release()
        optimizer.step()
        optimizer.synchronize()
    assert _operations(recorder, optimizer) == [
        *LEARNED,
        "all_reduce inp.0",
        "all_reduce inp.1",
        "all_reduce mid.0",
        "all_reduce mid.1",
        "all_reduce end.0",
        "all_reduce end.1",
        "all_reduce inp.0",
        "all_reduce inp.1",
        "all_reduce mid.0",
        "all_reduce mid.1",
        "all_reduce end.0",
        "all_reduce end.1",
    ]
