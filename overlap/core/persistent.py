"""The operations of a bucket, which are the same ones in every step: checked and laid out the first time.

[Note: cold code] Between two buckets the processor computes gradients and copies what travels, so what it runs when the
next bucket is full comes from memory. Checking the arguments of a reduction, 45 µs in a loop, took 180 µs there, of the
thread that everything waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_

import torch

from overlap.core.bucket import Bucket, Known
from overlap.transport.communicator import Communicator, Start, Wide, Work

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def reduce_scatter(comm: Communicator, bucket: Bucket, counts: Sequence[int] | None = None) -> Work:
    """Issue the reduction of ``bucket.outgoing`` into this rank's shard, ``bucket.incoming``."""
    whole, shard, op, wide = bucket.outgoing, bucket.incoming, bucket.op, bucket.wide_gradients
    return _again(
        bucket,
        "reduce",
        (comm, whole, shard, op, wide, counts),
        _places(whole, shard, wide),
        lambda: comm.reduce_scatter_init(whole, shard, op, counts=counts, wide=wide, label=bucket.label),
    )


def all_reduce(comm: Communicator, bucket: Bucket) -> Work:
    """Issue the reduction of ``bucket.outgoing`` into all of ``bucket.incoming``."""
    mine, whole, op = bucket.outgoing, bucket.incoming, bucket.op
    return _again(
        bucket,
        "reduce",
        (comm, mine, whole, op),
        _places(mine, whole, None),
        lambda: comm.all_reduce_init(mine, whole, op, label=bucket.label),
    )


def all_gather(comm: Communicator, bucket: Bucket, counts: Sequence[int] | None = None) -> Work:
    """Issue the gathering of ``bucket.travelling``, in place."""
    whole, wide = bucket.travelling, bucket.wide_parameters
    return _again(
        bucket,
        "gather",
        (comm, whole, wide, counts),
        _places(whole, whole, wide),
        lambda: comm.all_gather_init(whole[bucket.own], whole, counts=counts, wide=wide, label=bucket.label),
    )


def _places(send: torch.Tensor, recv: torch.Tensor, wide: Wide | None) -> tuple[int, ...]:
    """Where the memory is: ``model.share_memory()``, or a queue between processes, moves it under the same tensors."""
    if wide is None:
        return send.data_ptr(), recv.data_ptr()
    return send.data_ptr(), recv.data_ptr(), wide.send.data_ptr(), wide.recv.data_ptr()


def _again(
    bucket: Bucket, what: str, arguments: tuple[object, ...], places: tuple[int, ...], init: Callable[[], Start]
) -> Work:
    """What was issued last time, if all `arguments` are the very same objects, and their memory is where it was."""
    known = bucket.starts.get(what)
    if known is None or known.places != places or not _same(known.arguments, arguments):
        known = bucket.starts[what] = Known(arguments, places, init())
    return known.start()


def _same(ones: tuple[object, ...], others: tuple[object, ...]) -> bool:
    return len(ones) == len(others) and all(map(is_, ones, others))
