"""Sends buckets: their operations, the type of gradients on the wire, and the factors before and after.

load():    gradients ─ × before ─▶ narrowed or compressed ─▶ bucket.outgoing          (when the bucket is launched)
unload():  bucket.incoming ─▶ widened or decompressed ─▶ bucket.gradients.shard        (when its reduction was awaited)
           of a carried bucket, who moves it narrows and widens (`overlap.transport.operation.Wide`)
rescale(): × after                                                                    (where somebody used the parameter)

[Note: cold code] The two operations of a bucket are the same ones in every step: checked and laid out the first time.
Between two buckets the processor computes gradients and copies what travels, so what it runs when the next bucket is full
comes from memory. Checking the arguments of a reduction, 45 µs in a loop, took 180 µs there, of the thread that everything
waits for.
"""

from __future__ import annotations

from typing import Any

import torch

from overlap.core.bucket import Bucket, Known
from overlap.core.handles import use_count, watch
from overlap.core.shards import ShardUpdate
from overlap.plan.plan import Placement, leads
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.compression import BF16Compressor, FP16Compressor, NoneCompressor
from overlap.transport.cuda.math import can_inspect, cast_scale
from overlap.transport.memory import copy_gradient
from overlap.transport.operation import Operation, Wide

__all__ = ["COLLECTIVES", "DecoupledCollectives", "Exchange", "returns_slices"]

_WIRE_DTYPES = {NoneCompressor: None, FP16Compressor: torch.float16, BF16Compressor: torch.bfloat16}


class DecoupledCollectives:
    """Issues a bucket's reduction and gathering; see :class:`overlap.plan.strategy.Collectives`."""

    def reduce(self, comm: Communicator, bucket: Bucket) -> None:
        """Issue the reduction of ``bucket.outgoing`` into ``bucket.incoming``: this rank's shard, or all of it.

        An all-reduce, where every rank updates whole parameters; a reduce-scatter, where each updates its shard; a
        reduction to one rank, where that owns all of the bucket.
        """
        send, recv, op, wide = bucket.outgoing, bucket.incoming, bucket.op, bucket.wide_gradients
        places = send.data_ptr(), recv.data_ptr(), wide and (wide.send.data_ptr(), wide.recv.data_ptr())
        known = bucket.reduction
        if (  # spelled out: a call would cost as much as all of it
            known is None
            or known.comm is not comm
            or known.send is not send
            or known.recv is not recv
            or known.op is not op
            or known.wide is not wide
            or known.places != places
        ):
            known = bucket.reduction = Known(comm, send, recv, op, wide, places, comm.prepare(_reduction(bucket)))
        bucket.work = known.start()

    def gather(self, comm: Communicator, bucket: Bucket) -> bool:
        """Issue the gathering of ``bucket.travelling``, in place: from all shards' ranks, or from the owner of it all.

        Returns whether somebody else has a tensor over the parameters, for which no gate waits.
        """
        whole, wide = bucket.travelling, bucket.wide_parameters
        places = whole.data_ptr(), wide and (wide.send.data_ptr(), wide.recv.data_ptr())
        known = bucket.gathering
        if (
            known is None
            or known.watch is None
            or known.comm is not comm
            or known.recv is not whole
            or known.wide is not wide
            or known.places != places
        ):
            start = comm.prepare(_gathering(bucket))  # has a view of the memory, which the watch is to count as ours
            watched = watch(bucket.parameters.whole, None if known is None else known.watch)
            known = bucket.gathering = Known(comm, whole, whole, None, wide, places, start, watched)
        assert known.watch is not None
        held = use_count(known.watch.memory._cdata) > known.watch.ours and comm.size > 1
        bucket.work = known.start()
        return held


COLLECTIVES = DecoupledCollectives()


def _reduction(bucket: Bucket) -> Operation:
    return Operation(
        leads(Placement.PARTIAL, bucket.plan.placement),
        bucket.outgoing,
        bucket.incoming,
        bucket.op,
        root=bucket.owner or 0,
        send_counts=bucket.counts,
        wide=bucket.wide_gradients,
        label=bucket.label,
    )


def _gathering(bucket: Bucket) -> Operation:
    whole, parameters = bucket.travelling, bucket.parameters
    apart = (bucket.master is None or whole is parameters.whole) and not parameters.offloaded
    return Operation(
        leads(bucket.plan.placement, Placement.REPLICATED),
        parameters.shard if apart else whole[bucket.own],
        whole,
        root=bucket.owner or 0,
        recv_counts=bucket.counts,
        wide=bucket.wide_parameters,
        label=bucket.label,
    )


def returns_slices(compression: Any) -> bool:
    """Whether reduced values may be cut into shards; a user's own compression takes and gives whole tensors."""
    return any(compression is ours for ours in _WIRE_DTYPES)


class Exchange:
    """An optimizer's choice among Horovod's ``compression``, ``op`` and ``gradient_predivide_factor``.

    Raises ``ValueError`` or ``TypeError`` for what gradients cannot be reduced with.
    """

    def __init__(self, compression: Any, op: Any, predivide: float, world_size: int) -> None:
        _check_op(op)
        if not predivide > 0:
            raise ValueError(f"gradient_predivide_factor should be above 0 and is {predivide}")
        if predivide != 1 and op is not ReduceOp.AVG:
            raise ValueError(
                f"gradient_predivide_factor splits the division of an average and is {predivide}, while op is {op.name}; "
                "use op=Average"
            )
        if not (
            callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))
        ):
            raise TypeError(
                "compression should be Compression.none, .fp16, .bf16 or a class with the static methods compress(tensor) "
                f"and decompress(tensor, ctx), and is {compression!r}"
            )
        self.averages = op is ReduceOp.AVG  # by whatever factors
        self._compressor: Any = None if returns_slices(compression) else compression
        self._wire_dtype = _WIRE_DTYPES[compression] if self._compressor is None else None
        self._before, self._after, self.op = 1.0, 1.0, op
        if predivide != 1:
            self._before, self._after, self.op = 1.0 / predivide, predivide / world_size, ReduceOp.SUM
        self._contexts: dict[Bucket, list[Any]] = {}
        #: Gradients travel as they are: there is nothing to load, to unload or to rescale.
        self.plain = self._compressor is None and self._wire_dtype is None and self._before == self._after == 1

    def wire_itemsize(self, dtype: torch.dtype) -> int | None:
        """Bytes of an element on the wire; None where it is sent as it is, or a user's own compression decides."""
        return None if self._wire_dtype is None or not dtype.is_floating_point else self._wire_dtype.itemsize

    def load(self, bucket: Bucket) -> None:
        """Fill ``bucket.outgoing`` with what is to be reduced into ``bucket.incoming``.

        Of a carried bucket it becomes that on its way: ``bucket.wide_gradients``.
        """
        if self._compressor is not None:
            self._compress(bucket)
            return
        gradients = bucket.gradients.whole
        narrow = self._wire_dtype if gradients.dtype.is_floating_point else None
        dtype = gradients.dtype if narrow is None else narrow
        if dtype is gradients.dtype and self._before == 1:
            return
        if bucket.outgoing.dtype is not dtype or bucket.outgoing is gradients:
            bucket.outgoing = bucket.sends(dtype)
            if dtype is not gradients.dtype:
                bucket.incoming = bucket.outgoing if not bucket.sharded else bucket.receives(dtype)
        if bucket.carried and dtype is not gradients.dtype and self._before == 1:
            if bucket.wide_gradients is None:
                bucket.wide_gradients = Wide(gradients, bucket.gradients.shard)
            return
        if gradients.is_cuda and can_inspect(gradients) and gradients.dtype in (torch.float32, dtype):
            cast_scale([bucket.outgoing], [gradients], self._before)  # keeps marks and makes no new ones, in one pass
            return
        if self._before == 1:
            bucket.outgoing.copy_(gradients)  # a product into another type takes ten times as long
        else:
            torch.mul(gradients, self._before, out=bucket.outgoing)

    # - Sparse gradients, which are gathered and added up by every rank

    def narrowed(self, values: torch.Tensor) -> torch.Tensor:
        """The values of a sparse gradient in the type in which they are sent.

        Raises ``TypeError`` for a compression of the user's own.
        """
        if self._compressor is not None:
            raise TypeError(
                f"{self._compressor!r} cannot be applied to a sparse gradient, whose values from all ranks are gathered: "
                "wrap the optimizer with sparse_as_dense=True or another compression"
            )
        narrow = self._wire_dtype if values.dtype.is_floating_point else None
        return (values * self._before).to(values.dtype if narrow is None else narrow)

    def share(self, world_size: int) -> float:
        """The factor that the sum of all ranks' values is multiplied by."""
        return 1.0 / world_size if self.op is ReduceOp.AVG else self._after

    def _compress(self, bucket: Bucket) -> None:
        contexts: list[Any] = []
        dtype: torch.dtype | None = None
        for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True):
            assert slot.view is not None
            numel = slot.param.numel()
            packed, context = self._compressor.compress(slot.view * self._before)
            if packed.numel() != numel or not (packed.is_floating_point() or packed.is_complex()):
                raise TypeError(
                    f"{self._compressor!r} made {packed.numel()} elements of {packed.dtype} of the {numel} of "
                    f"{slot.name!r}; a reduction adds element to element, so their number has to stay, as floating point"
                )
            if dtype is None:
                dtype = packed.dtype
                if bucket.outgoing.dtype is not dtype or bucket.outgoing is bucket.gradients.whole:
                    bucket.incoming = bucket.outgoing = torch.zeros_like(bucket.gradients.whole, dtype=dtype)
            if packed.dtype is not dtype:
                raise TypeError(
                    f"{self._compressor!r} made {packed.dtype} of {slot.name!r} and {dtype} of other parameters in its "
                    "bucket, which are reduced together: compress() should return one dtype for all"
                )
            copy_gradient(bucket.outgoing[offset : offset + numel], packed.reshape(-1))
            contexts.append((packed.shape, context))
        self._contexts[bucket] = contexts

    def unload(self, bucket: Bucket) -> None:
        """Put the reduced values into ``bucket.gradients.shard``."""
        if self._compressor is not None:
            self._decompress(bucket)
        elif bucket.arrived is not bucket.gradients.shard and bucket.wide_gradients is None:
            bucket.gradients.shard.copy_(bucket.arrived)
        bucket.received()

    def _decompress(self, bucket: Bucket) -> None:
        slots = zip(bucket.slots, bucket.spec.offsets, self._contexts.pop(bucket), strict=True)
        for slot, offset, (shape, context) in slots:
            assert slot.view is not None
            packed = bucket.incoming[offset : offset + slot.param.numel()].view(shape)
            copy_gradient(slot.view, self._compressor.decompress(packed, context).view(slot.view.shape))

    def rescale(self, bucket: Bucket, shards: ShardUpdate | None, factor: float = 1.0) -> None:
        """Multiply the reduced gradients of used parameters by the rest of the division, and by `factor`."""
        factor *= self._after
        if factor == 1:
            return
        if bucket.sharded:
            assert shards is not None
            gradients = shards.gradients_of(bucket)
        else:
            gradients = [slot.view for slot in bucket.slots if slot.view is not None and not slot.unused]
        for gradient in gradients:
            gradient.mul_(factor)


def _check_op(op: Any) -> None:
    if op in (ReduceOp.AVG, ReduceOp.SUM):
        return
    if isinstance(op, ReduceOp):
        raise ValueError(
            f"op should be Average or Sum and is {op.name}: the {op.name.lower()} of the ranks' gradients is no gradient"
        )
    if "adasum" in repr(op).lower():
        raise ValueError("op=Adasum is not supported: it is another update rule, not a sum; use Average or Sum")
    raise TypeError(f"op should be Average or Sum and is {op!r}")
