"""The distributed optimizers of a session: which parameters each has, and which are gone."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object
from overlap.transport.peer_queries import PeerQueries

__all__ = ["Owner", "Registry"]

log = logging.getLogger("dear")


class Owner(Protocol):
    """The holder of an optimizer's parameters and of the hooks on their model."""

    @property
    def unfinished(self) -> bool:
        """Whether this rank had a backward pass and no step after it."""

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether any of `parameters` belongs to this owner."""

    @property
    def channels(self) -> Collection[str]:
        """The names of the communicators on which this owner's labels have a meaning of their own."""

    def meaning(self, label: str) -> str:
        """A description of what an operation with this label carries; empty where the label says so itself.

        On any thread.
        """

    def hand_over(self, unfinished: bool) -> None:
        """End what is in flight and take the hooks off the model. On every rank; `unfinished` tells of any rank."""

    def retire(self) -> None:
        """Do as :meth:`hand_over`, where all ranks have issued the same operations."""


class Registry:
    """All optimizers by topic, a name that is the same on all ranks. The script alone decides how long one lives."""

    def __init__(self, control: Communicator, peer_queries: PeerQueries) -> None:
        self._control, self._peer_queries = control, peer_queries
        self._entries: dict[str, tuple[weakref.ref[Any], list[Owner]]] = {}
        self._registered = 0

    def meaning(self, channel: str, label: str) -> str:
        """A description of the operation with this label on the communicator of name `channel`. On any thread."""
        owners = [owner for _, owners in list(self._entries.values()) for owner in owners]
        here = [owner for owner in owners if channel in owner.channels]
        # An operation that is handed to another thread goes over a communicator of that thread's own.
        known = here or (owners if len(owners) == 1 else [])
        return known[0].meaning(label) if known else ""

    @property
    def optimizers(self) -> list[Any]:
        """All optimizers that this process has not let go of."""
        return [optimizer for reference, _ in self._entries.values() if (optimizer := reference()) is not None]

    def having(self, parameters: Sequence[torch.Tensor]) -> list[Any]:
        """The optimizers that have any of `parameters`; not one from which another has taken them."""
        found = []
        for reference, owners in self._entries.values():
            optimizer = reference()
            if optimizer is not None and any(owner.has(parameters) for owner in owners):
                found.append(optimizer)
        return found

    def shell_of(self, optimizer: Any) -> Any:
        """The distributed optimizer made last that wraps `optimizer` on this rank; `optimizer` itself where none does."""
        shells = [shell for shell in self.optimizers if shell.wraps(optimizer)]
        return shells[-1] if shells else optimizer

    def register(self, optimizer: Any, owner: Owner) -> str:
        """Register an optimizer, with its `owner` until all ranks have dropped it; returns its topic between ranks.

        On every rank.
        """
        self._registered += 1
        topic = f"state/{self._registered}"
        self._entries[topic] = weakref.ref(optimizer), [owner]
        return topic

    def add_owner(self, topic: str, owner: Owner) -> None:
        """Add another owner of a registered optimizer's parameters, for as long as the first owner. On every rank."""
        self._entries[topic][1].append(owner)

    def topic_of(self, optimizer: Any) -> str:
        """The topic of an optimizer that is registered."""
        return next(topic for topic, (reference, _) in self._entries.items() if reference() is optimizer)

    def take_over(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take `parameters` from the optimizers that have them, dropped or not, on this rank or another. On every rank.

        An optimizer that has lost parameters on one rank cannot step on any. One exchange, whoever has what.
        """
        owners = {
            (topic, number): owner
            for topic, (_, owners) in self._entries.items()
            for number, owner in enumerate(owners)
        }
        mine = {name: (owner.has(parameters), owner.unfinished) for name, owner in owners.items()}
        everybodys = allgather_object(self._control, mine)
        for name, owner in owners.items():
            found = [theirs[name] for theirs in everybodys]
            if any(has for has, _ in found):
                owner.hand_over(any(unfinished for _, unfinished in found))

    def abandoned(self) -> set[str]:
        """The topics of optimizers that are dead on this rank; what they shared still answers the other ranks."""
        return {topic for topic, (optimizer, _) in self._entries.items() if optimizer() is None}

    def abandon(self) -> None:
        """End all optimizers, since ranks are lost. Their hooks are taken off, on this rank."""
        for _, owners in self._entries.values():
            for owner in owners:
                try:
                    owner.retire()
                except Exception as error:  # what it waited for
                    log.debug("an optimizer ends: %s", error)

    def forget(self, topic: str) -> None:
        """Let go of an optimizer that all ranks have dropped, with the same operations issued."""
        _, owners = self._entries.pop(topic)
        self._peer_queries.off(topic)
        for owner in owners:
            owner.retire()
