"""The price of a start, method by method, against what can be said with a pencil."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bench.startups import (
    MODELS,
    Layer,
    bytescheduler,
    ddp_buckets,
    dear,
    fill,
    horovod,
    layers_of,
    overlapped,
    ready,
)
from overlap.plan.cost_model import CostModel

MB = 1024 * 1024
LAYERS = [Layer("", 0.01, 0.02, (MB,)) for _ in range(10)]
FREE, BYTES, STARTS = CostModel(0.0, 0.0), CostModel(0.0, 0.02 / MB), CostModel(0.1, 0.0)


def test_buckets_take_what_fits_and_at_least_one() -> None:
    assert fill([3, 3, 3, 9, 1], 6) == [2, 1, 1, 1]
    assert fill([3, 3], 0) == [1, 1]


def test_a_bucket_of_ddp_is_closed_by_the_gradient_with_which_it_is_full() -> None:
    assert ddp_buckets([3, 3, 3, 9, 1], 1, 6) == [1, 2, 1, 1]
    assert ddp_buckets([], 1, 6) == []


@pytest.mark.parametrize("model", MODELS)
def test_buckets_of_ddp_are_those_that_torch_makes(model: str) -> None:
    sizes = [nbytes for _, nbytes in ready(layers_of(model, "rtx2080ti", MODELS[model]))]
    tensors = [torch.empty(nbytes // 4, device="meta") for nbytes in sizes]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MB]
    made, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors))
    assert sorted(made) == made
    assert [len(bucket) for bucket in made] == ddp_buckets(sizes)


def test_without_a_price_only_computation_is_left() -> None:
    steps = [
        overlapped(LAYERS, FREE),
        horovod(LAYERS, FREE, cycle=0.0),
        dear(LAYERS, FREE, 0),
        bytescheduler(LAYERS, FREE),
    ]
    assert steps == pytest.approx([0.3] * 4)


def test_bytes_alone() -> None:
    # An all-reduce takes as long as a layer's backward, half of one as long as its forward.
    assert overlapped(LAYERS, BYTES) == pytest.approx(0.3 + 0.02)
    assert dear(LAYERS, BYTES, 0) == pytest.approx(0.3 + 0.01 + 0.01)  # the first gather, the last reduction
    assert bytescheduler(LAYERS, BYTES) == pytest.approx(0.3 + 0.02)
    assert dear(LAYERS, BYTES, 10 * MB) == pytest.approx(0.3 + 0.2)  # one bucket hides nothing


def test_starts_alone() -> None:
    # Ten of them are longer than computation; DeAR has half of each under either half of the step.
    assert overlapped(LAYERS, STARTS) == pytest.approx(0.1 + 0.02 + 10 * 0.1)
    assert overlapped(LAYERS, STARTS, [9, 1]) == pytest.approx(0.3 - 0.02 + 0.1 + 0.1)
    assert dear(LAYERS, STARTS, 0) == pytest.approx(10 * 0.05 + 0.01 + 0.02 + 10 * 0.05)
    assert dear(LAYERS, STARTS, 5 * MB) == pytest.approx(2 * 0.05 + 0.05 + 0.2 + 0.05)
    assert horovod(LAYERS, STARTS, cycle=0.0) < overlapped(LAYERS, STARTS)


def test_the_most_urgent_layer_goes_first() -> None:
    # The wire is busy with the second layer when the first one's gradient comes, which forward needs at once.
    two = [Layer("", 0.5, 0.1, (MB,)), Layer("", 0.1, 0.1, (16 * MB,))]
    per_mb = CostModel(0.0, 0.1 / MB)
    assert overlapped(two, per_mb) == pytest.approx(0.6 + 0.1 + 1.7)
    assert bytescheduler(two, per_mb, partition=MB) == pytest.approx(0.1 + 0.1 + 1.7)


def test_layers_have_the_profiles_times_and_the_models_bytes() -> None:
    layers = layers_of("resnet50", "rtx2080ti", 64)
    assert sum(layer.nbytes for layer in layers) == 4 * 25_557_032
    assert sum(layer.forward for layer in layers) == pytest.approx(0.088, rel=0.01)
