"""The distributed optimizers of a session: who has which parameters, and who is gone."""

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
    """What has parameters, and hooks on their model, on behalf of an optimizer."""

    @property
    def unfinished(self) -> bool:
        """Whether this rank had a backward pass and no step after it."""

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether any of `parameters` is its own."""

    @property
    def channels(self) -> Collection[str]:
        """Names of the communicators on which its labels have a meaning of their own."""

    def meaning(self, label: str) -> str:
        """What an operation of this label carries, in words; empty where it says so itself. On any thread."""

    def hand_over(self, unfinished: bool) -> None:
        """End what is in flight and take the hooks off the model. On every rank; `unfinished` tells of any rank."""

    def retire(self) -> None:
        """The same where all ranks have issued the same operations."""


class Registry:
    """Optimizers by topic, a name that is the same on all ranks. The script alone decides how long one lives."""

    def __init__(self, control: Communicator, peer_queries: PeerQueries) -> None:
        self._control, self._peer_queries = control, peer_queries
        self._entries: dict[str, tuple[weakref.ref[Any], list[Owner]]] = {}
        self._registered = 0

    def meaning(self, channel: str, label: str) -> str:
        """What the label of an operation on the communicator of name `channel` means. On any thread."""
        owners = [owner for _, owners in list(self._entries.values()) for owner in owners]
        here = [owner for owner in owners if channel in owner.channels]
        # An operation that is handed to another thread goes over a communicator of that thread's own.
        known = here or (owners if len(owners) == 1 else [])
        return known[0].meaning(label) if known else ""

    @property
    def optimizers(self) -> list[Any]:
        """Optimizers that this process has not let go of."""
        return [optimizer for reference, _ in self._entries.values() if (optimizer := reference()) is not None]

    def having(self, parameters: Sequence[torch.Tensor]) -> list[Any]:
        """Those that have any of `parameters`; not one from which another has taken them."""
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
        """Remember an optimizer, and `owner` until all ranks have dropped it; its topic between ranks. On every rank."""
        self._registered += 1
        topic = f"state/{self._registered}"
        self._entries[topic] = weakref.ref(optimizer), [owner]
        return topic

    def add_owner(self, topic: str, owner: Owner) -> None:
        """Something else that has the parameters of a registered optimizer, as long as the first owner. On every rank."""
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
        """Topics of optimizers that are dead on this rank; what they shared still answers the other ranks."""
        return {topic for topic, (optimizer, _) in self._entries.items() if optimizer() is None}

    def abandon(self) -> None:
        """Ranks are lost: no optimizer goes on. Their hooks are taken off, on this rank."""
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
