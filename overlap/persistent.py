"""The operations of a bucket, which are the same ones in every step: checked and laid out the first time.

[Note: cold code] Between two buckets the processor computes gradients and copies what travels, so what it runs when the
next bucket is full comes from memory. Checking the arguments of a reduction, 45 µs in a loop, took 180 µs there, of the
thread that everything waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_

from overlap.bucket import Bucket
from overlap.communicator import Communicator, Start, Work

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def reduce_scatter(comm: Communicator, bucket: Bucket, counts: Sequence[int] | None = None) -> Work:
    """Issue the reduction of ``bucket.outgoing`` into this rank's shard, ``bucket.incoming``."""
    whole, shard, op, wide = bucket.outgoing, bucket.incoming, bucket.op, bucket.wide_gradients
    return _again(
        bucket,
        "reduce",
        (comm, whole, shard, op, wide, counts),
        lambda: comm.reduce_scatter_init(whole, shard, op, counts=counts, wide=wide, label=bucket.label),
    )


def all_reduce(comm: Communicator, bucket: Bucket) -> Work:
    """Issue the reduction of ``bucket.outgoing`` into all of ``bucket.incoming``."""
    mine, whole, op = bucket.outgoing, bucket.incoming, bucket.op
    return _again(
        bucket, "reduce", (comm, mine, whole, op), lambda: comm.all_reduce_init(mine, whole, op, label=bucket.label)
    )


def all_gather(comm: Communicator, bucket: Bucket, counts: Sequence[int] | None = None) -> Work:
    """Issue the gathering of ``bucket.travelling``, in place."""
    whole, wide = bucket.travelling, bucket.wide_parameters
    return _again(
        bucket,
        "gather",
        (comm, whole, wide, counts),
        lambda: comm.all_gather_init(whole[bucket.own], whole, counts=counts, wide=wide, label=bucket.label),
    )


def _again(bucket: Bucket, what: str, arguments: tuple[object, ...], init: Callable[[], Start]) -> Work:
    """What was issued last time, if all `arguments` are the very same objects."""
    known = bucket.starts.get(what)
    if known is None or len(known[0]) != len(arguments) or not all(map(is_, known[0], arguments)):
        known = bucket.starts[what] = (arguments, init())
    return known[1]()
