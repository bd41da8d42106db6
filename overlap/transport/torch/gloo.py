"""Point-to-point messages between the ranks of one group, over a gloo context of our own.

Of its own, because then neither the user's collectives nor their tags can meet ours, and because it can be torn down
when a peer is lost: gloo cannot interrupt a blocked wait, but a wait that runs into its time limit closes every
connection of its context, which ends all the others, here and on the peers.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from comm_core import TransportError

__all__: list[str] = []

# A rank may be away for hours (an evaluation on rank 0); that is the watchdog's to report, not the transport's to end.
_FOREVER = datetime.timedelta(days=7)
_AT_ONCE = datetime.timedelta(milliseconds=1)
_TAG_OF_THE_END = 1 << 20


class Message(NamedTuple):
    """A posted send or receive."""

    work: dist.Work
    peer: int
    nbytes: int
    verb: str


def tear_down(gloo: Any) -> None:
    """Close all connections of a ``ProcessGroupGloo``, so that every wait on them ends with an error, on the peers too."""
    for step in range(
        1, gloo.size()
    ):  # from a peer whose connection is closed already a receive fails, and closes nothing
        peer = (gloo.rank() + step) % gloo.size()
        with contextlib.suppress(RuntimeError):
            gloo.recv([torch.empty(1, device="cpu")], peer, _TAG_OF_THE_END).wait(_AT_ONCE)


class Link:
    """Nonblocking sends and receives, matched by peer and tag in posting order, and polite waits for them."""

    def __init__(self, store: Any, rank: int, size: int, setup: datetime.timedelta) -> None:
        """`setup`: how long peers may take to connect."""
        self.rank = rank
        self.size = size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, setup) if size > 1 else None
        self._broken = False

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        """Start sending a tensor that is not empty."""
        assert self._gloo is not None
        work = self._guard("sending", peer, tensor.nbytes, self._gloo.send, [tensor], peer, tag)
        return Message(work, peer, tensor.nbytes, "sending")

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        """Start receiving into a tensor that is not empty."""
        assert self._gloo is not None
        work = self._guard("receiving", peer, tensor.nbytes, self._gloo.recv, [tensor], peer, tag)
        return Message(work, peer, tensor.nbytes, "receiving")

    def wait(self, message: Message) -> None:
        """Block, without the GIL and without spinning, until the message has gone or come.

        Once per message: gloo takes a completion away with the wait for it, and a second wait never ends.
        """
        self._guard(message.verb, message.peer, message.nbytes, message.work.wait, _FOREVER)

    def tear_down(self) -> None:
        """Close all connections, so that every wait on them ends with an error, on the peers too."""
        if self._broken or self._gloo is None:
            return
        self._broken = True
        tear_down(self._gloo)

    def close(self) -> None:
        """Let go of the connections."""
        self._gloo = None

    def _guard(self, verb: str, peer: int, nbytes: int, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:
            direction = "to" if verb == "sending" else "from"
            raise TransportError(f"{verb} {nbytes} bytes {direction} rank {peer}: {error}") from error
