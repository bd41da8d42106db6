"""Single sends and receives over torch.distributed, which never hold up a collective."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from overlap.transport.torch.gloo import Link, Message
from overlap.transport.torch.worker_thread import PendingWork

__all__: list[str] = []


class LooseMessages:
    """Messages on a link of their own: posted by the caller, awaited by a thread each, in whatever order they end."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pending: dict[PendingWork, None] = {}

    def send(self, flat: torch.Tensor, peer: int, tag: int, label: str) -> PendingWork:
        return self._start("send", label, flat, lambda: self._link.send(flat, peer, tag))

    def recv(self, flat: torch.Tensor, peer: int, tag: int, label: str) -> PendingWork:
        return self._start("recv", label, flat, lambda: self._link.recv(flat, peer, tag))

    def pending(self) -> list[PendingWork]:
        return [work for work in list(self._pending) if not work.done()]

    def close(self) -> None:
        self._link.close()

    def _start(self, kind: str, label: str, flat: torch.Tensor, post: Callable[[], Message]) -> PendingWork:
        work = PendingWork(kind, label, self._link.rank, self._link.size, flat.nbytes)
        if not flat.numel():
            work.finish()
            return work
        message = post()
        self._pending[work] = None
        alive = [flat]  # until the message has gone or come

        def wait() -> None:
            try:
                self._link.wait(message)
                work.finish()
            except BaseException as error:  # it belongs to whoever waits for the work
                work.finish(error)
            self._pending.pop(work, None)
            alive.clear()

        threading.Thread(target=wait, name=f"dear-{kind}", daemon=True).start()
        return work
