"""Memory of a device that comes and goes under the same tensors.

    compute stream   read ─▶ free    take ─▶                 read ─▶ free
    communicator                       [1]└─▶ gather ─▶ [2]┘

[1] whoever issues an operation has it wait for the current stream    [2] `arrive()` has the current stream wait for it

[Note: freed memory] The allocator gives freed memory to the stream that took it, its home, while the device is still
reading there: what that stream is given next runs after the reading. With [1] and [2] so does what other streams do. The
host waits for nothing, and never has more memory than its own order of taking and freeing says, however far it is ahead of
the device. Streams beside the home follow it when they take part, and it follows them when the memory is freed.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DeviceMemory", "pinned"]


class DeviceMemory:
    """The memory behind `whole`, which has its storage for itself. Tensors over it stay valid, and read nothing between.

    With `zeros`, it has zeros whenever it comes back; else what it has then is not known.
    """

    __slots__ = ("_home", "_nbytes", "_others", "_storage", "_whole", "_zeros")

    def __init__(self, whole: torch.Tensor, *, zeros: bool) -> None:
        self._whole, self._zeros, self._storage = whole, zeros, whole.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._home: Any = _current_stream(whole)
        self._others: list[Any] = []

    def take(self) -> None:
        """There is memory, and what the current stream is given next may use it."""
        stream = _current_stream(self._whole)
        if self._nbytes and not self._storage.nbytes():
            self._storage.resize_(self._nbytes)
            self._home = stream
            if self._zeros:
                self._whole.zero_()
        elif stream != self._home:
            stream.wait_stream(self._home)
            if stream not in self._others:
                self._others.append(stream)

    def free(self) -> None:
        """Give the memory back; what was enqueued so far may still use it."""
        stream = _current_stream(self._whole)
        for other in {*self._others, stream} - {self._home}:
            self._home.wait_stream(other)
        self._others.clear()
        self._storage.resize_(0)


def pinned(numel: int, dtype: torch.dtype, place: torch.device) -> torch.Tensor:
    """Zeros in the host's memory, which the device at `place` copies from and to while the host goes on."""
    return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=place.type == "cuda")


def _current_stream(tensor: torch.Tensor) -> Any:
    """The stream that computes on the device of `tensor`; None for memory of the host, which tests take for a device's."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
