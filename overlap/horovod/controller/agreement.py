"""Whether the ranks mean the same by one name (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from overlap.horovod.controller.request import Kind, Request, TensorSpec

__all__ = ["disagreement"]

#: Kinds whose tensors may differ in the first dimension.
_FREE_ROWS = (Kind.ALLGATHER, Kind.ALLTOALL)


def disagreement(requests: Mapping[int, Request]) -> str | None:
    """The first difference between the ranks' requests, with both values and ranks; None when there is none.

    A rank that was refused locally counts as a difference.
    """
    for rank, request in sorted(requests.items()):
        if request.refusal:
            return f"{request.title}: refused on rank {rank}: {request.refusal}"
    title = next(iter(requests.values())).title
    for what, value in _QUESTIONS:
        found = _differ({rank: value(request) for rank, request in sorted(requests.items())})
        if found:
            return f"{title}: {what} between ranks: {found}"
    if next(iter(requests.values())).kind is Kind.BROADCAST_OBJECT:
        return None
    for index in range(len(next(iter(requests.values())).tensors)):
        found = _tensors_differ({rank: request.tensors[index] for rank, request in sorted(requests.items())}, requests)
        if found:
            return f"{title}{_which(index, requests)}: {found}"
    return None


def _number_of_tensors(request: Request) -> int:
    return 0 if request.kind is Kind.BROADCAST_OBJECT else len(request.tensors)


_QUESTIONS: tuple[tuple[str, Callable[[Request], Any]], ...] = (
    ("the number of tensors differs", _number_of_tensors),
    ("the reduction differs", lambda request: request.op),
    ("prescale_factor differs", lambda request: request.prescale),
    ("postscale_factor differs", lambda request: request.postscale),
    ("root_rank differs", lambda request: request.root),
    ("the ranks of the process set differ", lambda request: request.ranks),
)


def _tensors_differ(specs: Mapping[int, TensorSpec], requests: Mapping[int, Request]) -> str | None:
    labels = _differ({rank: spec.label for rank, spec in specs.items()})
    if labels:
        return f"names differ between ranks: {labels}"
    dtypes = _differ({rank: spec.dtype for rank, spec in specs.items()})
    if dtypes:
        return f"dtypes differ between ranks: {dtypes}"
    kind = next(iter(requests.values())).kind
    free = kind in _FREE_ROWS
    shapes = _differ({rank: spec.shape[1:] if free else spec.shape for rank, spec in specs.items()}, specs)
    if shapes:
        beyond = " beyond the first dimension" if free else ""
        return f"shapes differ between ranks{beyond}: {shapes}"
    return None


def _differ(values: Mapping[int, Any], specs: Mapping[int, TensorSpec] | None = None) -> str | None:
    """Names two ranks with different values and shows both (whole shapes where `specs` are given)."""
    first, *others = values
    for rank in others:
        if not _alike(values[rank], values[first]):
            shown = {member: specs[member].shape if specs else values[member] for member in (first, rank)}
            return f"{shown[first]} on rank {first} and {shown[rank]} on rank {rank}"
    return None


def _alike(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)  # a factor of NaN is the same on all ranks


def _which(index: int, requests: Mapping[int, Request]) -> str:
    request = next(iter(requests.values()))
    label = request.tensors[index].label
    if label:
        return f", {label!r}"
    return f", tensor {index} of {len(request.tensors)}" if len(request.tensors) > 1 else ""
