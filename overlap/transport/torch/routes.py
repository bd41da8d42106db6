"""Chooses the stages of a collective on one rank: a ring for much data, one exchange with everybody for little.

What is known when an operation is issued is worked out then; stages, and the buffers that they need, are made when it is
this operation's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from comm_core import ReduceOp
from overlap.transport.checks import balanced_split
from overlap.transport.reduction import combine_all, is_half
from overlap.transport.torch.pipeline import Relay, RingReduce, ring_segment_numel
from overlap.transport.torch.ring import all_gather_ring, broadcast_chain, reduce_scatter_ring, shard_spans
from overlap.transport.torch.stages import SEGMENT_BYTES, DirectReduce, Exchange, Stage, view

__all__ = ["Routes"]

# Up to here one exchange with everybody is faster than two trips around the ring.
_SMALL_BYTES = 32 * 1024


class Routes:
    """The routes of rank `rank` among `size`. Tensors are flat and contiguous; counts are elements, by rank."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def reduce_scatter(
        self, send: torch.Tensor, out: torch.Tensor, counts: Sequence[int], op: ReduceOp, *, in_place: bool = False
    ) -> Callable[[], Stage]:
        """Reduce everybody's `send` into each rank's shard `out`; `in_place` where that is a part of `send`."""
        if self._size == 1 or is_half(send.dtype) or send.nbytes <= _SMALL_BYTES:
            return lambda: DirectReduce(send, out, counts, op, self._rank)
        limit = ring_segment_numel(max(counts), send.element_size())
        first, arrivals = reduce_scatter_ring(self._rank, counts, limit)
        return lambda: RingReduce(send, out, first, arrivals, op, self._size, in_place)

    def all_gather(self, send: torch.Tensor, recv: torch.Tensor, counts: Sequence[int]) -> Callable[[], Stage]:
        """Gather each rank's `send` in everybody's `recv`, of which it may be the part."""
        limit = ring_segment_numel(max(counts), recv.element_size())
        first, arrivals = all_gather_ring(self._rank, counts, limit)
        mine = shard_spans(counts)[self._rank]
        place = view(recv, mine)
        parts = [send[span.start - mine.start : span.stop - mine.start] for span in first]
        own = None if place.data_ptr() == send.data_ptr() else (place, send)
        return lambda: Relay(recv, parts, arrivals, own)

    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp) -> list[Stage]:
        """Reduce everybody's `send` into everybody's `recv`, which may be `send`."""
        if self._size == 1 or send.nbytes <= _SMALL_BYTES:
            return [self._exchange_all(send, recv, op)]
        counts = balanced_split(send.numel(), self._size)
        out = view(recv, shard_spans(counts)[self._rank])
        in_place = recv.data_ptr() == send.data_ptr()
        if in_place and is_half(send.dtype):
            send = send.clone()  # the direct exchange still sends parts of it while the owner writes its own
        reduce = self.reduce_scatter(send, out, counts, op, in_place=in_place)
        return [reduce(), self.all_gather(out, recv, counts)()]

    def _exchange_all(self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp) -> Stage:
        parts = [send if peer == self._rank else torch.empty_like(send) for peer in range(self._size)]
        others = [peer for peer in range(self._size) if peer != self._rank]

        def combine() -> None:
            # Everybody's own part is still being read by the sends until here.
            combine_all(op, [part.clone() if part is send else part for part in parts], recv, self._size)

        sends = [(peer, send) for peer in others]
        return Exchange(sends, [(peer, parts[peer]) for peer in others], afterwards=combine)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Callable[[], Stage]:
        """Copy `root`'s tensor into everybody's."""
        limit = max(1, SEGMENT_BYTES // tensor.element_size())
        first, arrivals = broadcast_chain(self._rank, self._size, root, tensor.numel(), limit)
        parts = [view(tensor, span) for span in first]
        return lambda: Relay(tensor, parts, arrivals)

    def reduce(self, send: torch.Tensor, recv: torch.Tensor | None, op: ReduceOp, root: int) -> list[Stage]:
        """Reduce everybody's `send` into `root`'s `recv`: a reduce-scatter whose shards then go to the root."""
        counts = balanced_split(send.numel(), self._size)
        spans = shard_spans(counts)
        mine = torch.empty(counts[self._rank], dtype=send.dtype, device="cpu")
        reduce = self.reduce_scatter(send, mine, counts, op)
        if recv is None:
            return [reduce(), Exchange([(root, mine)], [])]
        own = view(recv, spans[root])
        recvs = [(peer, view(recv, span)) for peer, span in enumerate(spans) if peer != root]
        return [reduce(), Exchange([], recvs, meanwhile=lambda: own.copy_(mine))]

    def all_to_all(
        self, send: torch.Tensor, recv: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Stage:
        """Send part i of `send` to rank i, and receive part j of `recv` from rank j."""
        outgoing, incoming = shard_spans(send_counts), shard_spans(recv_counts)
        # In step k everybody sends k ranks ahead and receives from k ranks behind: no host is sent to by all at once.
        steps = range(1, self._size)
        sends = [(peer, view(send, outgoing[peer])) for peer in ((self._rank + step) % self._size for step in steps)]
        recvs = [(peer, view(recv, incoming[peer])) for peer in ((self._rank - step) % self._size for step in steps)]
        source, place = view(send, outgoing[self._rank]), view(recv, incoming[self._rank])
        return Exchange(sends, recvs, meanwhile=lambda: place.copy_(source))
