"""Collects the outer state from the shares of all ranks into one piece, as a checkpoint has it.

How one rank learns the others' shares of the outer state, though they may not have come to its event yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from co2.part import Part, Shares, Vectors, as_real
from overlap.core.bucket import Slot
from overlap.transport.memory import from_flat
from overlap.transport.peer_queries import NoAnswer, PeerQueries

__all__ = ["ShareQuery", "assemble", "check_shapes"]


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
