"""What a rank asks for by name, and what all of them are told to do (pure: values that travel between ranks)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from overlap.transport.encoding import travels

__all__ = ["GiveUp", "Kind", "Leave", "Request", "Response", "TensorSpec"]


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
    """One tensor of a request."""

    shape: tuple[int, ...]
    dtype: str
    label: str = ""
    """What the tensor is called within a group (a parameter's name); compared between ranks where it is given."""


@travels
@dataclass(frozen=True, slots=True)
class Request:
    """What one rank asks for. Ranks that use the same kind and name in the same process set mean the same operation."""

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
        """How messages call the operation."""
        where = f" in process set {self.process_set}" if self.process_set else ""
        return f"{self.kind.value} {self.name!r}{where}"


@travels
@dataclass(frozen=True, slots=True)
class Leave:
    """From a rank that asks for nothing more, because it `why`, as in "has shut down"."""

    why: str


@travels
@dataclass(frozen=True, slots=True)
class GiveUp:
    """From the watchdog of rank 0: what is undecided will stay so."""

    reason: str


@travels
@dataclass(frozen=True, slots=True)
class Response:
    """What every rank of the process set is told, in the one order in which all of them carry it out."""

    request: Request
    """One rank's, the root's where there is one: what all the others' agree with."""
    error: str = ""
    mismatch: bool = False
    """Whether `error` says that the ranks disagree."""
    joined: tuple[int, ...] = ()
    """Ranks of the set that contribute nothing."""
    rows: tuple[tuple[int, ...], ...] = ()
    """Of an all-gather, for every tensor: how many rows each rank of the set contributes."""
    splits: tuple[tuple[int, ...], ...] = ()
    """Of an all-to-all: every rank's splits."""
    number: int = -1
    """Of a join: the last rank to join. Of add_process_set and remove_process_set: the number of the set."""
