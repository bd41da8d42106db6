"""Collectives by name in inference mode: on every rank or on one, synchronized inside or outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

import dear as hvd

# With the sum of ones over all ranks as its value, everywhere.
FORMS: dict[str, Callable[[], int]] = {
    "prescaled": lambda: hvd.allreduce_async(torch.full((3,), 0.5), op=hvd.Sum, prescale_factor=2.0),
    "postscaled": lambda: hvd.allreduce_async(torch.full((3,), 0.5), op=hvd.Sum, postscale_factor=2.0),
    "in place": lambda: hvd.allreduce_async_(torch.full((3,), 0.5), op=hvd.Sum, prescale_factor=2.0),
    "not contiguous": lambda: hvd.allreduce_async_(torch.ones(3, 2).t()[:, ::2], op=hvd.Sum),
    "average": lambda: hvd.allreduce_async(torch.full((3,), hvd.size())),
    "group": lambda: hvd.grouped_allreduce_async([torch.ones(3), torch.ones(2)], op=hvd.Sum),
    "group in place": lambda: hvd.grouped_allreduce_async_([torch.ones(3), torch.ones(2)], op=hvd.Sum),
    "rows": lambda: hvd.reducescatter_async(torch.full((4, 2), 0.25), op=hvd.Sum, prescale_factor=4.0),
    "rows averaged": lambda: hvd.reducescatter_async(torch.full((4, 2), hvd.size())),
    "broadcast": lambda: hvd.broadcast_async_(torch.full((3, 2), hvd.size()).t(), 0),
    "gathered": lambda: hvd.allgather_async(torch.full((3,), hvd.size())),
    "exchanged": lambda: hvd.alltoall_async(torch.full((hvd.size(),), hvd.size())),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("everybody", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_inference_mode(form: str, everybody: bool, inside: bool) -> None:
    hvd.init()
    infers = everybody or hvd.rank() == 0
    with torch.inference_mode(infers):
        handle = FORMS[form]()
        following = hvd.allreduce_async(torch.full((3,), 5.0), op=hvd.Sum)
        found = hvd.synchronize(handle) if inside else None
    found = found if inside else hvd.synchronize(handle)
    for tensor in [found[0]] if isinstance(found, tuple) else found if isinstance(found, list) else [found]:
        assert torch.equal(tensor, torch.full_like(tensor, hvd.size()))
    assert hvd.synchronize(following).tolist() == [5.0 * hvd.size()] * 3


def test_what_comes_back_outside_can_be_trained_with() -> None:
    """Though the thread that carries collectives out is in that mode for a moment."""
    hvd.init()
    for result in (hvd.reducescatter(torch.ones(4, 2)), hvd.allgather(torch.ones(2)), hvd.allreduce(torch.ones(2))):
        weight = torch.ones((), requires_grad=True)
        (weight * result).sum().backward()
        assert weight.grad is not None
        with contextlib.suppress(IndexError):
            result[0] += 1
