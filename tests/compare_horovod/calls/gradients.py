"""The gradient of every collective's input."""

from __future__ import annotations

from tests.compare_horovod.calls.call import Calls, gradient

__all__ = ["CALLS"]

CALLS: Calls = {
    "d allreduce": lambda hvd, r, n: gradient(lambda x: hvd.allreduce(x), 3, r),
    "d allreduce Sum": lambda hvd, r, n: gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 3, r),
    "d allreduce Min": lambda hvd, r, n: gradient(lambda x: hvd.allreduce(x, op=hvd.Min), 3, r),
    "d allreduce with factors": lambda hvd, r, n: gradient(
        lambda x: hvd.allreduce(x, prescale_factor=2.0, postscale_factor=3.0), 3, r
    ),
    "d allreduce Sum with factors": lambda hvd, r, n: gradient(
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), 3, r
    ),
    "d allreduce in fp16": lambda hvd, r, n: gradient(
        lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), 3, r
    ),
    "d grouped_allreduce": lambda hvd, r, n: gradient(lambda x: hvd.grouped_allreduce([x, 2 * x]), 3, r),
    "d grouped_allreduce Sum": lambda hvd, r, n: gradient(
        lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum), 3, r
    ),
    "d allgather": lambda hvd, r, n: gradient(hvd.allgather, 2 + r, r, columns=2),
    "d grouped_allgather": lambda hvd, r, n: gradient(lambda x: hvd.grouped_allgather([x, 2 * x]), 2 + r, r, 2),
    "d broadcast from 0": lambda hvd, r, n: gradient(lambda x: hvd.broadcast(x, 0), 3, r),
    "d broadcast from the last": lambda hvd, r, n: gradient(lambda x: hvd.broadcast(x, n - 1), 3, r),
    "d alltoall": lambda hvd, r, n: gradient(lambda x: hvd.alltoall(x), 2 * n, r),
    "d alltoall with splits": lambda hvd, r, n: gradient(
        lambda x: hvd.alltoall(x, splits=[1] * (n - 1) + [2]), n + 1, r
    ),
    "d reducescatter": lambda hvd, r, n: gradient(lambda x: hvd.reducescatter(x), 4, r),
    "d reducescatter Sum": lambda hvd, r, n: gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), 4, r),
    "d uneven reducescatter": lambda hvd, r, n: gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), 5, r),
    "d reducescatter with factors": lambda hvd, r, n: gradient(
        lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), 4, r
    ),
    "d grouped_reducescatter": lambda hvd, r, n: gradient(lambda x: hvd.grouped_reducescatter([x, 2 * x]), 4, r),
    "d grouped_reducescatter Sum": lambda hvd, r, n: gradient(
        lambda x: hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum), 4, r
    ),
}
