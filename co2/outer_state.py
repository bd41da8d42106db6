"""Collects the outer state from the shares of all ranks into one piece, as a checkpoint has it, and loads it.

How one rank learns the others' shares of the outer state, though they may not have come to its event yet.

[Note: one round ahead]
A round is averaged only when all ranks have sent it. So a rank that asks the others for their shares, having seen its own
last round arrive, finds them past the same event or past one more, whose average has not been made: they answer with
where they were before it.

[Note: who has loaded by when]
load() waits for nobody: Horovod's scripts load on rank 0 alone and broadcast afterwards. A rank that has loaded keeps all
it loaded until its next event, and asks nobody; and it keeps the share it had before, which is the answer for those who
have not loaded. They all have once a round that it sent afterwards has come back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from co2.averaged_parameters import AveragedParameters, Batch
from co2.communication import RoundCommunication, RoundThread
from co2.equations import OuterRule
from co2.inner_rates import InnerRates
from co2.join import Following
from co2.part import Part, Shares, Vectors, as_real
from co2.schedule import Event
from overlap.core.bucket import Slot
from overlap.transport.memory import from_flat
from overlap.transport.peer_queries import NoAnswer, PeerQueries

__all__ = ["SavedRounds", "ShareQuery", "assemble", "check_shapes"]


def assemble(parts: Sequence[Part], shares: Sequence[Shares]) -> Vectors:
    """Whole vectors by slot, shaped as the parameters (complex ones as pairs), from the shares of all ranks.

    Raises ``RuntimeError`` where they leave a gap.
    """
    outer: Vectors = {}
    for part in parts:
        complete = part.complete()
        if complete is not None:
            outer.update(complete)
            continue
        own = part.own_vectors()
        for slot in part.slots:
            outer[slot.index] = {**_joined(part, slot, shares), **own[slot.index]}
    return outer


def _joined(part: Part, slot: Slot, shares: Sequence[Shares]) -> dict[str, torch.Tensor]:
    like = as_real(slot.param)
    flats = {name: torch.empty(like.numel(), dtype=part.dtype, device="cpu") for name in part.shared}
    found = [share[slot.index] for share in shares if slot.index in share]
    covered = sum(high - low for low, high, _ in found)  # shards do not overlap
    if covered != like.numel():
        raise RuntimeError(
            f"of the outer state of parameter {slot.name!r}, {covered} of {like.numel()} elements are on the ranks: they "
            "do not train the same parameters. Freeze and unfreeze the same ones on every rank"
        )
    for low, high, vectors in found:
        for name, flat in flats.items():
            flat[low:high] = vectors[name]
    return {name: from_flat(flat, like) for name, flat in flats.items()}


def check_shapes(slots: Sequence[Slot], outer: Vectors) -> None:
    """Raise ``ValueError`` where saved vectors are not shaped as the parameters."""
    shapes = {slot.index: tuple(as_real(slot.param).shape) for slot in slots}
    for index, vectors in outer.items():
        saved = tuple(vectors["start"].shape)
        if shapes.get(index) != saved:
            raise ValueError(
                f"the outer state of parameter {index} has shape {saved}, and the optimizer's parameter "
                f"{shapes.get(index, 'does not exist')}: load it into the model that it was saved from, with parameters in "
                "the same order"
            )


_ANSWER_SECONDS = 600.0
_AGAIN_SECONDS = 0.01


class ShareQuery:
    """A question to `others` for their shares, on `topic`.

    Who answers None is asked again: no query waits for its rank's main thread.
    """

    def __init__(self, peer_queries: PeerQueries, topic: str, others: Sequence[int]) -> None:
        self._peer_queries, self._topic, self._others = peer_queries, topic, list(others)

    def ask(self, events: int) -> list[Shares]:
        """The others' shares after so many events. Raises :class:`NoAnswer` if one does not come."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        found: list[Shares] = []
        missing = self._others
        while missing:
            asked = [(rank, self._peer_queries.ask(rank, self._topic, events)) for rank in missing]
            left = max(deadline - time.monotonic(), 0.0)
            answers = {rank: PeerQueries.wait(answer, rank, self._topic, left) for rank, answer in asked}
            found += [share for share in answers.values() if share is not None]
            missing = [rank for rank, share in answers.items() if share is None]
            if missing:
                if left == 0:
                    raise NoAnswer(f"ranks {missing} did not come to event {events} within {_ANSWER_SECONDS:g} s")
                time.sleep(_AGAIN_SECONDS)
        return found


class SavedRounds(ABC):
    """Rounds as a checkpoint sees them, from anywhere between two steps: the base of `co2.rounds.Rounds`."""

    _COUNTERS: tuple[str, ...]  # that are saved
    rule: OuterRule
    following: Following
    parts: list[Part]
    steps: int
    events: int  # averages and rounds so far, the same on all ranks
    _last: Event
    _slots: list[Slot]
    _averaged: AveragedParameters
    _inner_rates: InnerRates
    _communication: RoundCommunication
    _changed: threading.Lock  # around changes of what the others may ask for
    _query: ShareQuery
    _thread: RoundThread | None

    def __init__(self) -> None:
        self._before_load: tuple[int, Shares] | None = None  # [Note: who has loaded by when], after so many events

    @abstractmethod
    def arrive(self) -> None:
        """Wait for the round in flight."""

    @abstractmethod
    def _forget(self) -> None:
        """All that is saved."""

    @abstractmethod
    def _take_in(self, batch: Batch) -> list[Part]:
        """Parameters that are trained for the first time."""

    def _forget_loaded(self) -> None:
        self._before_load = None  # [Note: who has loaded by when]

    def _answer(self, _sender: int, events: int) -> Shares | None:
        """This rank's shares after so many events, for another rank; None if it has not come there."""
        with self._changed:
            if self._before_load is not None and self._before_load[0] == events:
                return self._before_load[1]
            ahead = self.events - events
            if ahead < 0:
                return None
            if ahead > 1 or (ahead == 1 and self._last is not Event.ROUND):
                raise RuntimeError(f"asked for the outer state after event {events}, this rank is at {self.events}")
            return self._shares(passed=ahead == 1)  # [Note: one round ahead]

    def _shares(self, *, passed: bool) -> Shares:
        return {index: value for part in self.parts for index, value in part.share(passed=passed).items()}

    def collect(self) -> dict[str, Any]:
        """The outer state of all ranks, as a checkpoint has it. On any subset of ranks."""
        self.following.end()
        self.arrive()
        shares = self._query.ask(self.events) if any(part.moved_on for part in self.parts) else []
        with self._changed:
            shares = [self._shares(passed=False), *shares]
            outer, beside = assemble(self.parts, shares), self._beside(shares)
        counters = {name: getattr(self, name) for name in self._COUNTERS}
        counters |= {"longest": self._communication.longest, "outer": self.rule.name}
        return {"parameters": outer, **counters, **self._averaged.state(), **self._inner_rates.state(), **beside}

    def _beside(self, shares: Sequence[Shares]) -> dict[str, Any]:
        """What else ranks have a share of."""
        return {}

    def load(self, section: dict[str, Any] | None, inner: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Go on from what :meth:`collect` gave; without it, from the parameters as they are at the next step.

        `inner`: the state of the user's optimizer, by slot, which has been given to it, in the parameters' types.
        """
        if section is not None:
            saved = section.get("outer", "co2")
            if saved != self.rule.name:
                raise ValueError(
                    f"the outer state was saved with outer={saved!r}, and this optimizer has outer={self.rule.name!r}: "
                    "leave it out, and a round begins at the parameters as they are"
                )
            check_shapes(self._slots, section["parameters"])
        self.following.end()
        self.arrive()
        with self._changed:
            if self._before_load is None:
                self._before_load = self.events, self._shares(passed=False)
            self._forget()
            if section is None:
                return
            outer = section["parameters"]
            for batch in section.get("batches", [sorted(outer)]):  # as they were, for the same sums
                for part in self._take_in(tuple(batch)):
                    part.load(outer)
            self._averaged.load(section)
            self._inner_rates.load(section)
            vars(self).update({name: section[name] for name in self._COUNTERS})
            self._communication.longest = section["longest"]

    # - Where ranks are lost: see `co2.recovery`

    def left(self) -> dict[str, Any]:
        """What is left of these rounds when ranks are lost. What was on its way has failed, and is dropped."""
        with contextlib.suppress(Exception):
            self.following.wait()
        if self._thread is not None:
            self._thread.wait()
        self._thread = None
        return {
            "outer": self.rule.name,
            "names": [slot.name for slot in self._slots],
            "batches": [list(batch) for batch in self._averaged.batches],
            "steps": self.steps,
            "longest": self._communication.longest,
        }

    def begin_at(self, left: Mapping[str, Any]) -> None:
        """Begin a round with the outer state that others have `left`. On every rank; none has made a step yet."""
        start = {
            **dict.fromkeys(self._COUNTERS, 0),
            "pending": False,
            "active": [],
            "coming": [],
            "outer": self.rule.name,
        }
        self.load({**start, **left})
        self._forget_loaded()
