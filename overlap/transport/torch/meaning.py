"""Describes operations to the ranks they meet, so that none takes another operation's bytes for its own.

The tag of every message has a digest of what its sender means and the number of the operation: messages of different
operations never meet, at no byte and no round trip. Each then waits for the other in vain. So who waits for long writes
into the job's store what it waits in, and reads there what others wait in: whoever comes last finds that operations of one
number are different ones, and closes the connections. Then the others read it, too, and all raise with both.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from comm_core import ReduceOp

__all__ = ["Inquiry", "Meaning", "meaning_of"]

_NUMBERS, _DIGESTS = 10, 19  # bits of a tag
_COLLECTIVE = 1 << (_NUMBERS + _DIGESTS)  # above all tags of another purpose
_PATIENCE = 2.0  # seconds for a store, which may be out of reach
_TOLD = "all ranks of a communicator have to issue the same operations in the same order"


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of an operation: as text, and as the beginning of its messages' tags."""

    kind: str
    words: str
    digest: int

    def tag(self, number: int) -> int:
        """The tag of the messages of a communicator's operation `number`."""
        return self.digest | (number & ((1 << _NUMBERS) - 1))


def meaning_of(
    kind: str,
    tensor: torch.Tensor | None = None,
    op: ReduceOp | None = None,
    root: int | None = None,
    *,
    sized: bool = True,
) -> Meaning:
    """The meaning of an operation on `tensor`, whose type (and if `sized`, size) is the same on all ranks."""
    words = kind if tensor is None else f"{kind} of {str(tensor.dtype).removeprefix('torch.')}"
    words += "" if op is None else f", op {op.name.lower()}"
    words += "" if root is None else f", root {root}"
    words += f", {tensor.nbytes} bytes" if sized and tensor is not None else ""
    return Meaning(kind, words, _COLLECTIVE | (zlib.crc32(words.encode()) & ((1 << _DIGESTS) - 1)) << _NUMBERS)


class Inquiry:
    """Asks which operations other ranks of a communicator wait in, through a store that `connect` gives.

    `close` ends all waiting.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, size: int, close: Callable[[], None]) -> None:
        self._connect, self._rank, self._size, self._close = connect, rank, size, close
        self._store: Any = None
        self._asking = threading.Lock()
        self._asked = -1

    def begin(self, number: int, meaning: Meaning) -> None:
        """Ask, since this rank has waited in operation `number` for long. Waits for nobody; asks once for each."""
        if self._size > 1 and number > self._asked:
            self._asked = number
            threading.Thread(target=self._ask, args=(number, meaning), name="dear-inquiry", daemon=True).start()

    def why(self, number: int, meaning: Meaning) -> str | None:
        """The reason why operation `number` has failed, where another rank meant another one. Waits for the store."""
        found: list[str | None] = []
        thread = threading.Thread(target=lambda: found.append(self._other(number, meaning)), daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        return found[0] if found else None

    def _ask(self, number: int, meaning: Meaning) -> None:
        if self._other(number, meaning) is not None:
            self._close()

    def _other(self, number: int, meaning: Meaning) -> str | None:
        """What is to be said where another rank means another operation. Says what this one means before it looks."""
        try:
            with self._asking:
                if self._store is None:
                    self._store = self._connect()
                self._store.set(str(self._rank), f"{number} {meaning.words}")
                for peer in range(self._size):
                    if peer == self._rank or not self._store.check([str(peer)]):
                        continue
                    theirs, _, words = self._store.get(str(peer)).decode().partition(" ")
                    if int(theirs) == number and words != meaning.words:
                        return f"expected {meaning.words}, received {words} from rank {peer}; {_TOLD}"
        except RuntimeError:  # a store that cannot be asked: the job ends by another way
            pass
        return None
