"""Arguments of the wrong kind: one message with the name and the value, from every strategy, before anything is sent."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy
import pytest
import torch

from overlap.optimizer.arguments import KINDS, SharedArguments, check_kinds, check_passes

PACKAGES = ("dear", "wfbp", "mgwfbp", "bytescheduler_adapter", "oss", "fsdp", "osdp", "co2")
# Checked, with messages that say more, where they are used.
ELSEWHERE = {
    "optimizer",
    "named_parameters",
    "compression",
    "op",
    "gather_dtype",
    "recompute",
    "residency",
    "tune",
    "strategy",
    "outer_frequency",
    "warmup_steps",
}
WRONG: list[tuple[str, Any]] = [
    *((name, value) for name in ("eager", "asc", "sync_start", "broadcast_buffers") for value in ("no", 7, None, 0.0)),
    *((name, value) for name in ("elementwise", "per_parameter", "poison", "sparse_as_dense") for value in ("x", 2)),
    *((name, value) for name in ("backward_passes_per_step", "profile_steps") for value in (1.5, "2", True, None)),
    *((name, value) for name in ("num_nearby_layers", "num_groups", "nprocs_per_node") for value in (1.5, "2", True)),
    *((name, value) for name in ("threshold_mb", "outer_clip") for value in (True, [25])),
    *(
        (name, value)
        for name in ("merge_below_kb", "partition_mb", "credit_mb", "outer_lr", "whole_mb", "memory_limit_gb")
        for value in (True, "2")
    ),
    *(("outer_momentum", value) for value in (None, "x")),
    *(("check_every", value) for value in (-1, True, 1.5, "2")),
    *(("offload", value) for value in (True, "gpu")),
    *(("on_nonfinite", value) for value in (None, True, "warn")),
    *(("gradient_predivide_factor", value) for value in (None, "x")),
    *(("gap_penalty", value) for value in (None, "x")),
    *(("process_set", value) for value in (3, None, [0, 1])),
    *(("alpha_beta", value) for value in (3, (1e-5,), ("a", "b"))),
    *(("layerwise_times", value) for value in (3, [("a", 0.1)])),
    *((name, value) for name in ("policy", "exclude_parts", "outer") for value in (None, 3)),
    ("groups", True),
    *(("shard_group", value) for value in (True, 1.5, "rack")),
    *(("fsdp_plan", value) for value in ("own", 3)),
    *(("all_reduced", value) for value in (None, "half", True)),
    *((name, value) for name in ("fragments", "overlap_steps", "top_k") for value in (None, 1.5, True, "2")),
    *(("bits", value) for value in (4.0, "4", True)),
    *(("mixing", value) for value in (None, "x", True)),
]
RIGHT: list[tuple[str, Any]] = [
    *(("eager", value) for value in (True, False, 0, 1, numpy.bool_(True), numpy.int64(0))),
    *(("elementwise", value) for value in (True, 1, None)),
    *(("backward_passes_per_step", value) for value in (1, 0, numpy.int64(2))),
    *(("threshold_mb", value) for value in (0, 2.5, numpy.float32(1), "auto", "Auto", None)),
    *(("gap_penalty", value) for value in (True, 1.5)),
    *(("alpha_beta", value) for value in ((1e-5, 0), [1e-5, numpy.float64(1e-9)], None)),
    *(("groups", value) for value in (2, None, [[torch.zeros(1)]])),
    *(
        (name, value)
        for name in ("fragments", "overlap_steps", "top_k", "bits")
        for value in (2, numpy.int64(4), "auto")
    ),
    *(("bits", None), ("mixing", 0), ("mixing", 0.25), ("mixing", "auto")),
    ("unknown", object()),
]


def _wrap(package: str) -> Any:
    return importlib.import_module(package).DistributedOptimizer


def _takes(package: str) -> list[str]:
    return [name for name in inspect.signature(_wrap(package)).parameters if name != "others"]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_every_strategy_refuses_what_is_of_the_wrong_kind(name: str, value: Any) -> None:
    """Without a job: nothing is asked of other ranks before."""
    model = torch.nn.Linear(2, 2)
    takers = [package for package in PACKAGES if name in _takes(package)]
    assert takers
    for package in takers:
        with pytest.raises(TypeError) as raised:
            _wrap(package)(torch.optim.SGD(model.parameters(), 0.1), model, **{name: value})
        assert str(raised.value) == f"{name} should be {KINDS[name][0]} and is {value!r}"


@pytest.mark.parametrize(("name", "value"), RIGHT)
def test_what_fits_is_accepted(name: str, value: Any) -> None:
    check_kinds({name: value})


@pytest.mark.parametrize("package", PACKAGES)
def test_every_argument_has_a_kind_or_a_check_of_its_own(package: str) -> None:
    assert set(_takes(package)) - set(KINDS) <= ELSEWHERE


def test_every_kind_belongs_to_an_argument_and_fits_its_default() -> None:
    assert set(KINDS) == {name for package in PACKAGES for name in _takes(package)} - ELSEWHERE
    assert set(KINDS) <= {name for name, _ in WRONG}
    for package in PACKAGES:
        parameters = inspect.signature(_wrap(package)).parameters
        check_kinds({name: each.default for name, each in parameters.items() if each.default is not each.empty})


def test_the_words_of_a_message() -> None:
    with pytest.raises(TypeError, match=r"^elementwise should be True, False or None and is 'x'$"):
        check_kinds({"elementwise": "x"})
    with pytest.raises(TypeError, match=r"^backward_passes_per_step should be a whole number and is 1\.5$"):
        check_passes(1.5)  # type: ignore[arg-type]  # what set_backward_passes_per_step() calls, too
    with pytest.raises(TypeError, match=r"^process_set should be a ProcessSet and is 3$"):
        SharedArguments.of({"process_set": 3})
