"""What scripts of DeAR's own repository give ``DistributedOptimizer``: what it is in our words, and what refuses it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy
import pytest
import torch

import dear
from overlap.optimizer.dears_arguments import bucket_mb, in_our_words
from overlap.transport.compression import Compression

PACKAGES = ("dear", "wfbp", "mgwfbp", "bytescheduler_adapter", "oss", "fsdp", "osdp", "co2")
MODEL = torch.nn.Linear(2, 2)


class NoneCompressor:
    """As a script of theirs brings it along."""

    name = "none"


class EFTopKCompressor:
    name = "eftopk"


# What benchmark programs pass, whatever the method.
PASSED: dict[str, Any] = {
    "compression": NoneCompressor(),
    "is_sparse": False,
    "density": 1,
    "seq_layernames": None,
    "layerwise_times": None,
    "norm_clip": None,
    "threshold": 0,
    "writer": None,
    "gradient_path": "./",
    "fp16": False,
    "rdma": False,
}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_their_benchmarks_pass_asks_for_nothing(package: str) -> None:
    given = {**PASSED, "mgwfbp": package == "mgwfbp", "multi_job_scheduling": False, "momentum_correction": False}
    assert in_our_words({**given, "model": MODEL}, package) == {
        "named_parameters": MODEL,
        "compression": Compression.none,
    }


@pytest.mark.parametrize(
    ("strategy", "given", "ours"),
    [
        ("dear", {"exclude_parts": "allgather"}, {"exclude_parts": "allgather"}),
        ("dear", {"threshold": None, "num_nearby_layers": 1}, {"threshold_mb": None, "num_nearby_layers": 1}),
        ("dear", {"threshold": 25}, {"threshold_mb": 25}),
        ("dear", {"threshold": 67108864}, {"threshold_mb": 256}),
        ("oss", {"threshold": -1}, {"num_groups": 1}),
        ("wfbp", {"threshold": -1}, {"num_groups": 1}),
        ("wfbp", {"threshold": 536870912}, {"num_groups": 1}),
        ("wfbp", {"threshold": None}, {}),
        ("mgwfbp", {"threshold": 536870912, "mgwfbp": True}, {}),
        ("mgwfbp", {"mgwfbp": True, "asc": True, "rdma": True}, {"asc": True}),
        ("mgwfbp", {"seq_layernames": ["a", "b"], "layerwise_times": (3, 2)}, {"layerwise_times": {"a": 3, "b": 2}}),
        ("mgwfbp", {"layerwise_times": {"a": 0.1}}, {"layerwise_times": {"a": 0.1}}),
        ("mgwfbp", {"mgwfbp": False, "asc": False}, {"asc": False, "num_groups": 2**31, "profile_steps": 0}),
        ("mgwfbp", {"mgwfbp": False, "threshold": -1}, {"num_groups": 1, "profile_steps": 0}),
        ("wfbp", {"mgwfbp": False}, {}),
        ("dear", {"fp16": True}, {"compression": Compression.fp16}),
        ("wfbp", {"fp16": True, "compression": Compression.fp16}, {"compression": Compression.fp16}),
        ("dear", {"compression": None}, {"compression": Compression.none}),
        ("dear", {"compression": Compression.bf16}, {"compression": Compression.bf16}),
        ("dear", {"is_sparse": numpy.bool_(False), "density": 0.001}, {}),
        ("dear", {"threshold_mb": 4, "eager": True, "xyz": 1}, {"threshold_mb": 4, "eager": True, "xyz": 1}),
    ],
)  # fmt: skip
def test_what_means_something_here_is_honoured(strategy: str, given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert in_our_words(given, strategy) == ours


@pytest.mark.parametrize(
    ("strategy", "given", "told"),
    [
        ("dear", {"is_sparse": True}, "is_sparse=True: gradients are not sparsified here; compression=Compression.bf16"),
        ("dear", {"compression": EFTopKCompressor()}, "compression=eftopk: gradients are not sparsified here"),
        ("wfbp", {"momentum_correction": True}, "momentum_correction=True: it corrects sparsified gradients"),
        ("dear", {"norm_clip": 0}, "norm_clip=0: clip between backward() and step() with torch.nn.utils.clip_grad_norm_"),
        ("dear", {"writer": "w"}, "writer='w': optimizer.save_profile()"),
        ("dear", {"multi_job_scheduling": True}, "multi_job_scheduling=True: gradients are reduced as soon"),
        ("dear", {"mgwfbp": True}, "mgwfbp=True is the strategy 'mgwfbp'"),
        ("mgwfbp", {"mgwfbp": False, "asc": True}, "asc=True is about merging, and mgwfbp=False merges nothing"),
        ("mgwfbp", {"mgwfbp": False, "tune": True}, "tune=True is about merging"),
        ("mgwfbp", {"mgwfbp": False, "threshold": 4}, "wfbp reduces every tensor alone (0) or all in one (-1)"),
        ("mgwfbp", {"mgwfbp": False, "layerwise_times": [0.1]}, "belong to the strategy 'mgwfbp', not to 'wfbp'"),
        ("mgwfbp", {"threshold": 8192 * 8}, "threshold=65536: mgwfbp merges by cost, and anyway below merge_below_kb=256"),
        ("wfbp", {"threshold": 67108864}, "alone (0) or all in one (-1); dear fuses with threshold_mb=256"),
        ("oss", {"threshold": None}, "threshold=None: oss fuses by size alone; threshold_mb=0"),
        ("mgwfbp", {"threshold": -1}, "threshold=-1: mgwfbp merges by cost, and anyway below merge_below_kb=25600"),
        ("co2", {"threshold": 4}, "threshold=4: co2 has no such setting; dear fuses with threshold_mb=4"),
        ("bytescheduler_adapter", {"threshold": 4}, "cuts layers, with partition_mb"),
        ("dear", {"layerwise_times": [0.1], "seq_layernames": ["a"]}, "belong to the strategy 'mgwfbp', not to 'dear'"),
        ("mgwfbp", {"layerwise_times": [0.1], "seq_layernames": ["a", "b"]}, "has 2 names and layerwise_times has 1"),
        ("mgwfbp", {"seq_layernames": ["a"]}, "no times are given: give both or neither"),
        ("dear", {"fp16": True, "compression": Compression.bf16}, "fp16=True is compression=Compression.fp16"),
    ],
)  # fmt: skip
def test_what_is_not_done_here_is_refused_in_one_line_with_ours(
    strategy: str, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError) as raised:
        in_our_words(given, strategy)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": MODEL, "named_parameters": MODEL}, "model is another name of named_parameters"),
        ({"threshold": 25, "threshold_mb": 25}, "threshold is another name of threshold_mb, and both are given"),
        ({"threshold": "25"}, "threshold should be a number of MB, of elements"),
        ({"threshold": True}, "and is True"),
        ({"threshold": float("nan")}, "and is nan"),
    ],
)
def test_two_names_of_one_thing_and_wrong_kinds_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        in_our_words(given, "dear")


def test_megabytes_and_elements_are_told_apart() -> None:
    assert [bucket_mb(each) for each in (0.5, 25, 256, 65535)] == [0.5, 25, 256, 65535]
    assert [bucket_mb(each) for each in (65536, 67108864, 536870912)] == [0.25, 256, 2048]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_takes_the_model_by_their_name(package: str) -> None:
    """Without a job: what is wrong is found before anything is asked of other ranks, and the model is not what is wrong."""
    make: Any = importlib.import_module(package).DistributedOptimizer
    optimizer = torch.optim.SGD(MODEL.parameters(), 0.1)
    with pytest.raises(TypeError, match=r"^poison should be True, False or None and is 'x'$"):
        make(optimizer, model=MODEL, poison="x", **PASSED)
    with pytest.raises(TypeError, match=r"^poison should be .* and is 'x'$"):
        make(optimizer, MODEL, None, poison="x")
    for second in ((MODEL,), ()):
        rest = {} if second else {"named_parameters": MODEL}
        with pytest.raises(TypeError, match=r"^model is another name of named_parameters, .* both are given$"):
            make(optimizer, *second, model=MODEL, **rest)


def test_a_strategy_that_dear_hands_to_decides_what_a_name_means() -> None:
    make: Any = dear.DistributedOptimizer
    with pytest.raises(ValueError, match="alone \\(0\\) or all in one"):
        make(torch.optim.SGD(MODEL.parameters(), 0.1), model=MODEL, strategy="wfbp", threshold=4)
    with pytest.raises(ValueError, match="asc=True is about merging, and mgwfbp=False merges nothing"):
        make(torch.optim.SGD(MODEL.parameters(), 0.1), model=MODEL, strategy="mgwfbp", mgwfbp=False, asc=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_none_of_their_names_is_one_of_ours_with_another_meaning(package: str) -> None:
    ours = set(inspect.signature(importlib.import_module(package).DistributedOptimizer).parameters)
    assert ours & {"model", *PASSED, "mgwfbp", "multi_job_scheduling", "momentum_correction"} <= {
        "compression",
        "layerwise_times",
    }
