"""Exact values beside parameters that travel rounded: what a script writes to these counts, the rest stays exact."""

from __future__ import annotations

import pytest
import torch

from overlap.core.buckets.flat_buffer import FlatBuffer
from overlap.features.rounded_parameters import FreedMaster, Master
from overlap.plan.partition import BucketSpec
from overlap.transport.cuda import streams

EXACT = 1.0 + 2.0**-12  # bfloat16 makes it 1.0


def _master(dtype: torch.dtype) -> tuple[torch.Tensor, Master]:
    """Of four parameters, of which this rank has the last two; both are known exactly."""
    parameters = torch.ones(4, dtype=dtype)
    master = Master(parameters, slice(2, 4), torch.bfloat16)
    master.put(master.values[:], torch.full((2,), EXACT, dtype=dtype))
    master.land()
    return parameters, master


@pytest.fixture(params=[False, True], ids=["host", "device"], autouse=True)
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host computes, or launches only and looks at nothing."""
    monkeypatch.setattr(streams, "on_device", lambda _tensor: request.param)


@pytest.mark.parametrize("value", [0.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_written_counts_and_the_rest_stays_exact(dtype: torch.dtype, value: float) -> None:
    parameters, master = _master(dtype)
    assert parameters.tolist() == [1.0] * 4
    parameters[3] = value
    master.follow()
    assert master.values.tolist() == [EXACT, value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_nobody_wrote_to_stays_exact(dtype: torch.dtype) -> None:
    _, master = _master(dtype)
    master.follow()
    assert master.values.tolist() == [EXACT] * 2


def test_what_is_put_back_is_what_travels() -> None:
    parameters, master = _master(torch.float32)
    master.put(master.values[1:], torch.full((1,), 3.0 + 2.0**-12))
    master.land()
    assert parameters.tolist() == [1.0, 1.0, 1.0, 3.0]
    master.follow()
    assert master.values.tolist() == [EXACT, 3.0 + 2.0**-12]


def _freed(*values: float, used: bool = False) -> tuple[FlatBuffer, FreedMaster]:
    """Of four parameters, of which this rank has the last two, with `values`."""
    parameters = FlatBuffer(
        BucketSpec((0,), (0,), 4, 4), slice(2, 4), torch.float32, torch.device("cpu"), apart=True, freed=True
    )
    parameters.shard.copy_(torch.tensor(values))
    return parameters, FreedMaster(parameters, torch.bfloat16, used=used)


@pytest.mark.parametrize("used", [False, True])
def test_a_freed_bucket_keeps_exact_values_and_sends_rounded_ones(used: bool) -> None:
    parameters, master = _freed(EXACT, 2.0, used=used)
    assert master.told is not used
    master.pack()
    assert master.wire.tolist() == [0.0, 0.0, 1.0, 2.0]
    master.land()
    assert parameters.whole.tolist() == [0.0, 0.0, 1.0, 2.0]
    assert parameters.shard.tolist() == [EXACT, 2.0]


@pytest.mark.parametrize("parameters_first", [True, False])
def test_exact_values_that_are_loaded_count_where_they_are_those_of_the_parameters(parameters_first: bool) -> None:
    parameters, master = _freed(7.0, 7.0)
    if parameters_first:
        parameters.shard.copy_(torch.tensor([1.0, 0.25]))
    for place in range(2):
        master.put(parameters.shard[place : place + 1], torch.tensor([EXACT]))
    if not parameters_first:
        parameters.shard.copy_(torch.tensor([1.0, 0.25]))
        master.follow()
    assert parameters.shard.tolist() == [EXACT, 0.25]
    parameters.shard[0] = 1.0
    master.follow()
    assert parameters.shard.tolist() == ([EXACT, 0.25] if parameters_first else [1.0, 0.25]), "until the next update"
    master.follow()
    parameters.shard[0] = 1.0
    master.follow()
    assert parameters.shard.tolist() == [1.0, 0.25]


def test_loaded_values_may_be_forgotten() -> None:
    parameters, master = _freed(7.0, 7.0)
    master.put(parameters.shard, torch.tensor([EXACT, EXACT]))
    master.forget()
    parameters.shard.fill_(1.0)
    master.follow()
    assert parameters.shard.tolist() == [1.0, 1.0]


def test_what_is_forgotten_is_the_parameter() -> None:
    parameters, master = _master(torch.float32)
    parameters[2] = 0.25
    master.forget()
    master.follow()
    assert master.values.tolist() == [0.25, 1.0]
