"""A mailbox over the c10d store, where messages wait until their reader comes."""

from __future__ import annotations

import datetime
import math
import queue
import threading
import time
from typing import Any

import torch.distributed as dist

from overlap.transport.torch.rendezvous import Rendezvous

__all__ = ["OwnMailbox", "StoreMailbox"]

_CHUNK_BYTES = 1 << 20
_LONGEST_WAIT_SECONDS = 86400.0  # in one call: the store counts milliseconds, in 32 bits where it polls


class OwnMailbox:
    """The mailbox of a rank that is alone."""

    def __init__(self) -> None:
        self._letters: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def post(self, peer: int, payload: bytes) -> None:
        self._letters.put(payload)

    def receive(self, limit: float | None) -> tuple[int, bytes] | None:
        try:
            return 0, self._letters.get(timeout=limit)
        except queue.Empty:
            return None


class StoreMailbox:
    """A mailbox between ranks; one connection writes, another waits.

    Both are opened with the first letter: most groups never write any, and where reverse name lookups are slow, every
    connection to the store costs seconds.
    """

    def __init__(self, meeting: Rendezvous, prefix: str, rank: int) -> None:
        self._rank, self._meeting, self._prefix = rank, meeting, prefix
        self._out: Any = None
        self._in: Any = None
        self._writing = threading.Lock()
        self._read = 0

    def post(self, peer: int, payload: bytes) -> None:
        chunks = [payload[start : start + _CHUNK_BYTES] for start in range(0, len(payload), _CHUNK_BYTES)]
        with self._writing:
            if self._out is None:
                self._out = self._meeting.connect(self._prefix)
            number = self._out.add(f"count/{peer}", 1)
            for index, chunk in enumerate(chunks):
                self._out.set(f"{peer}/{number}/{index}", chunk)
            # The head comes last: who sees it may read all the rest.
            self._out.set(f"{peer}/{number}", f"{self._rank} {len(chunks)}")

    def receive(self, limit: float | None) -> tuple[int, bytes] | None:
        """The next letter; None after `limit` seconds without one."""
        if self._in is None:
            self._in = self._meeting.connect(self._prefix)
        head = f"{self._rank}/{self._read + 1}"
        until = math.inf if limit is None else time.monotonic() + limit
        while not self._arrives(head, min(max(0.0, until - time.monotonic()), _LONGEST_WAIT_SECONDS)):
            if time.monotonic() >= until:
                return None
        self._read += 1
        sender, num_chunks = (int(word) for word in self._in.get(head).split())
        keys = [f"{head}/{index}" for index in range(num_chunks)]
        payload = b"".join(self._in.get(key) for key in keys)
        for key in (head, *keys):
            self._in.delete_key(key)
        return sender, payload

    def _arrives(self, head: str, seconds: float) -> bool:
        try:
            self._in.wait([head], datetime.timedelta(seconds=seconds))
        except (dist.DistStoreError, RuntimeError) as error:
            if "timeout" in str(error).lower():
                return False
            raise
        return True
