"""The two operations of a bucket, which are the same ones in every step: checked and laid out the first time.

[Note: cold code] Between two buckets the processor computes gradients and copies what travels, so what it runs when the
next bucket is full comes from memory. Checking the arguments of a reduction, 45 µs in a loop, took 180 µs there, of the
thread that everything waits for.
"""

from __future__ import annotations

from overlap.core.bucket import Bucket, Known
from overlap.transport.communicator import Communicator

__all__ = ["gather", "reduce"]


def reduce(comm: Communicator, bucket: Bucket) -> None:
    """Issue the reduction of ``bucket.outgoing`` into ``bucket.incoming``: this rank's shard, or all of it.

    An all-reduce, where every rank updates whole parameters; a reduce-scatter, where each updates its shard; a reduction to
    one rank, where that owns all of the bucket.
    """
    send, recv, op, wide = bucket.outgoing, bucket.incoming, bucket.op, bucket.wide_gradients
    owner = bucket.spec.owner
    if bucket.holds_parameters and owner is not None:
        target = recv if owner == comm.rank else None
        bucket.work = comm.reduce_async(send, target, op, owner, label=bucket.label)
        return
    places = send.data_ptr(), recv.data_ptr(), wide and (wide.send.data_ptr(), wide.recv.data_ptr())
    known = bucket.reduction
    if known is None or not known.is_of(comm, send, recv, op, wide, places):
        if bucket.holds_parameters:
            start = comm.reduce_scatter_init(send, recv, op, counts=bucket.counts, wide=wide, label=bucket.label)
        else:
            start = comm.all_reduce_init(send, recv, op, label=bucket.label)
        known = bucket.reduction = Known(comm, send, recv, op, wide, places, start)
    bucket.work = known.start()


def gather(comm: Communicator, bucket: Bucket) -> None:
    """Issue the gathering of ``bucket.travelling``, in place: from all shards' ranks, or from the one that owns it all."""
    whole, wide = bucket.travelling, bucket.wide_parameters
    owner = bucket.spec.owner
    if owner is not None:
        bucket.work = comm.broadcast_async(whole, owner, label=bucket.label)
        return
    places = whole.data_ptr(), 0, wide and (wide.send.data_ptr(), wide.recv.data_ptr())
    known = bucket.gathering
    if known is None or not known.is_of(comm, whole, whole, None, wide, places):
        start = comm.all_gather_init(whole[bucket.own], whole, counts=bucket.counts, wide=wide, label=bucket.label)
        known = bucket.gathering = Known(comm, whole, whole, None, wide, places, start)
    bucket.work = known.start()
