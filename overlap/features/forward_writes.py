"""Detects parameters that forward itself changes, differently on each rank, so that replicas drift apart.

An initialisation by the first batch, a codebook that follows the data. In some rounds, ever more seldom, parameters are
marked where a forward pass begins and looked at where it ends. Those that changed are compared between ranks in the call
that closes the round: where all ranks have written the same (a clamp, a normalisation), nothing is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch.nn.parameter import is_lazy

from overlap.core.engine import Watcher
from overlap.core.feature import Feature
from overlap.core.gathering import Transit
from overlap.features.buffers import contents_of
from overlap.features.replicas import difference, digests_of
from overlap.transport.broadcast import is_plain
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object

__all__ = ["ForwardWrites", "WrittenInForward", "looked_at"]

log = logging.getLogger("dear")

_LATER = 63  # from this round on contents are looked at, as in the first one; in between only what torch counts

_Mark = tuple[int, int, str]  # where it lies, how often it was changed there, its contents


class WrittenInForward(RuntimeError):
    """Forward has written to a parameter, and not the same on each rank."""


class _Told(Protocol):
    """Says when a forward pass begins and ends."""

    watcher: Watcher | None


class ForwardWrites(Feature):
    """Raises on all ranks, in the call after ``step()`` that closes a round, where forward made replicas differ.

    Args:
        calls: its operations follow the script's calls.
        ranks: those of `calls` in the job.
        parameters: gives those that all ranks have alike, by name, without waiting for their values.
        transit: of their values.
        apart: names of those for which it is known whose values count.
    """

    def __init__(
        self,
        calls: Communicator,
        ranks: Sequence[int],
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        transit: Transit,
        apart: Callable[[], Collection[str]],
    ) -> None:
        self._calls, self._ranks, self._parameters, self._transit, self._apart = (
            calls,
            ranks,
            parameters,
            transit,
            apart,
        )
        self._closed = 0  # rounds
        self._depth = 0  # of the forward passes of modules in each other
        self._marks: dict[str, tuple[torch.Tensor, _Mark]] = {}
        self._written: set[str] = set()  # in this round, on this rank
        self._found = ""
        self._engine: _Told | None = None

    def bind(self, engine: _Told) -> None:
        """Have `engine` tell this feature of forward passes."""
        self._engine = engine
        engine.watcher = self

    # - A forward pass, on this rank

    def entered(self) -> None:
        self._depth += 1
        if self._depth > 1 or torch._C._current_graph_task_id() >= 0:  # recomputed in backward
            return
        deep = self._closed == 0 or self._closed >= _LATER
        if deep:
            self._transit.arrive_all()
        updated = {id(slot.param) for bucket in self._transit.pending for slot in bucket.slots}  # in forward, by us
        self._marks = {
            name: (parameter, _mark(parameter, deep=deep))
            for name, parameter in self._parameters().items()
            if id(parameter) not in updated and _is_readable(parameter)
        }

    def left(self) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            marks, self._marks = self._marks, {}
            self._written |= {
                name for name, (parameter, mark) in marks.items() if _mark(parameter, deep=bool(mark[2])) != mark
            }

    # - A call that closes the round

    def verify(self) -> None:
        found, self._found = self._found, ""
        if found:
            raise WrittenInForward(found)

    def news(self) -> bool:
        self._written -= set(self._apart()) if self._written else set()
        return bool(self._written)

    def closed(self, news: bool, leader: Callable[[], int], factor: Callable[[], float]) -> None:
        if news:
            self._compare()
        self._closed, self._depth = self._closed + 1, 0
        if self._engine is not None:
            self._engine.watcher = self if looked_at(self._closed) and not self._found else None
            self._engine = None if self._found else self._engine  # it is said once

    def _compare(self) -> None:
        """On every rank."""
        written = set[str]().union(*allgather_object(self._calls, self._written))
        self._written = set()
        if not written:
            return
        self._transit.arrive_all()
        mine = digests_of({name: value for name, value in self._parameters().items() if name in written})
        found = difference(dict(zip(self._ranks, allgather_object(self._calls, mine), strict=True)))
        if found:
            self._found = (
                f"{found}: forward writes to it, on each rank by data of its own, and parameters were updated. Make a "
                "buffer of it, which step() makes rank 0's on all ranks; or write to it between steps, the same on every "
                "rank; where only the first forward does, run that before the optimizer is made"
            )

    def ending(self) -> None:
        if self._found:
            log.error("%s", self._found)


def looked_at(closed: int) -> bool:
    """Whether parameters are compared in the round after so many: 0, 1, 3, 7, 15, … (pure)."""
    return closed & (closed + 1) == 0


def _is_readable(parameter: torch.Tensor) -> bool:
    return (
        parameter.layout is torch.strided
        and parameter.device.type != "meta"
        and not is_lazy(parameter)
        and is_plain(parameter)
    )


def _mark(parameter: torch.Tensor, *, deep: bool) -> _Mark:
    version = -1 if parameter.is_inference() else parameter._version
    return parameter.data_ptr(), version, contents_of(parameter) if deep else ""
