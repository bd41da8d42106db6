"""DeAR's plan: fused in the order of use, issued in reverse, idle parameters last."""

from __future__ import annotations

import inspect

import pytest
import torch

import dear
from dear.schedule import plan_buckets
from overlap.plan.fusion import limits, size_and_device
from overlap.plan.partition import TensorSpec
from overlap.plan.plan import Facts, Placement

SPECS = [TensorSpec(256, 4, "fp32")] * 5
NOTHING: frozenset[int] = frozenset()


def _plan(units: tuple[tuple[int, ...], ...], idle: frozenset[int] = NOTHING, nearby: int = 1) -> list[tuple[int, ...]]:
    facts = Facts(units, (4, 3, 2, 1, 0), (1,) * 5, NOTHING, idle)
    plan = plan_buckets(facts, SPECS, [True] * 5, 2, threshold_bytes=None, num_nearby_layers=nearby)
    assert all(bucket.placement is Placement.SHARD for bucket in plan)
    return [bucket.spec.tensors for bucket in plan]


def test_last_used_layer_is_issued_first() -> None:
    assert _plan(((0, 1), (2,), (3, 4))) == [(3, 4), (2,), (0, 1)]


def test_neighbours_share() -> None:
    assert _plan(((0, 1), (2,), (3, 4)), nearby=2) == [(3, 4), (0, 1, 2)]


def test_whole_buckets_have_owners_in_turn() -> None:
    facts = Facts(((0,), (1,), (2,), (3,), (4,)), (4, 3, 2, 1, 0), (1,) * 5, NOTHING, NOTHING)
    plan = plan_buckets(facts, SPECS, [True] * 5, 2, threshold_bytes=None, num_nearby_layers=1, one_owner=True)
    assert [bucket.owner for bucket in plan] == [0, 1, 0, 1, 0]
    assert [bucket.spec.shares(2) for bucket in plan[:2]] == [(256, 0), (0, 256)]
    assert [plan[1].spec.own(rank, 2) for rank in (0, 1)] == [slice(0, 0), slice(0, 256)]


def test_idle_parameters_do_not_keep_their_neighbours_waiting() -> None:
    assert _plan(((0, 1), (2,), (3, 4)), idle=frozenset({3})) == [(4,), (2,), (0, 1), (3,)]


@pytest.mark.parametrize(
    ("threshold_mb", "layers", "model_mb", "expected"),
    [
        ("auto", None, 0, (1.0, None)),
        ("auto", None, 32, (1.0, None)),
        ("auto", None, 100, (3.125, None)),
        ("auto", 3, 640, (20.0, 3)),
        ("auto", None, 800, (25.0, None)),
        ("auto", None, 5000, (25.0, None)),
        (25.0, None, 100, (25.0, None)),
        (8.0, 2, 100, (8.0, 2)),
        (0.0, None, 100, (None, 1)),
        (0.0, 2, 100, (None, 2)),
        (None, 1, 100, (None, 1)),
    ],
)
def test_limits(
    threshold_mb: float | str | None, layers: int | None, model_mb: int, expected: tuple[float | None, int | None]
) -> None:
    assert limits(threshold_mb, layers, model_mb * 2**20) == expected


def test_a_model_is_as_large_as_what_is_trained_of_it() -> None:
    frozen = torch.nn.Parameter(torch.ones(100), requires_grad=False)
    params = [torch.nn.Parameter(torch.ones(10)), torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))]
    optimizer = torch.optim.SGD([{"params": [params[0], frozen]}, {"params": params[1:]}], 0.1)
    assert size_and_device(optimizer) == (4 * 10 + 2 * 7, "cpu")


def test_on_a_gpu_there_are_fewer_buckets() -> None:
    there = torch.nn.Parameter(torch.ones(2**20, 4, device="meta"))
    assert size_and_device(torch.optim.SGD([there], 0.1)) == (2**24, "cpu"), "where deferred_init() computes values"
    assert limits("auto", None, 100 * 2**20, "cuda") == (12.5, None)
    assert limits("auto", None, 4 * 2**20, "cuda") == (1.0, None)
    assert limits("auto", None, 800 * 2**20, "cuda") == (25.0, None)
    assert limits(2.0, None, 100 * 2**20, "cuda") == (2.0, None)


def test_the_default_fits_the_model() -> None:
    assert inspect.signature(dear.DistributedOptimizer).parameters["threshold_mb"].default == "auto"
