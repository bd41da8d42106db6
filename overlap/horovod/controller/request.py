"""What a rank asks for by name, and what all ranks are told to do, as values that are sent (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from overlap.transport.encoding import travels

__all__ = ["GiveUp", "Kind", "Leave", "Request", "Response", "TensorSpec", "disagreement"]


@travels
class Kind(Enum):
    """The operations that ranks agree on by name; the value is how messages call them."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    BROADCAST_OBJECT = "broadcast_object"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"
    ADD_PROCESS_SET = "add_process_set"
    REMOVE_PROCESS_SET = "remove_process_set"


@travels
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The description of one tensor of a request."""

    shape: tuple[int, ...]
    dtype: str
    label: str = ""
    """What the tensor is called within a group (a parameter's name); compared between ranks where it is given."""


@travels
@dataclass(frozen=True, slots=True)
class Request:
    """A request of one rank for an operation.

    Ranks that use the same kind and name in the same process set mean the same operation.
    """

    kind: Kind
    name: str
    process_set: int = 0
    tensors: tuple[TensorSpec, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    """A rank of the job, not of the process set."""
    splits: tuple[int, ...] = ()
    """Of an all-to-all: how many rows go to each rank of the set."""
    ranks: tuple[int, ...] = ()
    """Of the process set to add or to remove."""
    refusal: str = ""
    """Why this rank's own arguments were refused: nobody can carry the operation out."""

    @property
    def title(self) -> str:
        """The name of the operation in messages."""
        where = f" in process set {self.process_set}" if self.process_set else ""
        return f"{self.kind.value} {self.name!r}{where}"


@travels
@dataclass(frozen=True, slots=True)
class Leave:
    """The message of a rank that asks for nothing more, because it `why`, as in "has shut down"."""

    why: str


@travels
@dataclass(frozen=True, slots=True)
class GiveUp:
    """The message of rank 0's watchdog that what is undecided will stay so."""

    reason: str


@travels
@dataclass(frozen=True, slots=True)
class Response:
    """The answer that every rank of a process set is told, in the one order in which all carry operations out."""

    request: Request
    """One rank's, the root's where there is one: what all the others' agree with."""
    error: str = ""
    mismatch: bool = False
    """Whether `error` says that the ranks disagree."""
    rows: tuple[tuple[int, ...], ...] = ()
    """Of an all-gather, for every tensor: how many rows each rank of the set contributes."""
    splits: tuple[tuple[int, ...], ...] = ()
    """Of an all-to-all: every rank's splits."""
    number: int = -1
    """Of a join: the last rank to join. Of add_process_set and remove_process_set: the number of the set."""


# - Whether ranks mean the same by one name

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
