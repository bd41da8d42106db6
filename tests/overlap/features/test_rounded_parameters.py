"""Exact values beside parameters that travel rounded: what a script writes to these counts, the rest stays exact."""

from __future__ import annotations

import pytest
import torch

from overlap.features.rounded_parameters import Master
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


def test_what_is_forgotten_is_the_parameter() -> None:
    parameters, master = _master(torch.float32)
    parameters[2] = 0.25
    master.forget()
    master.follow()
    assert master.values.tolist() == [0.25, 1.0]
