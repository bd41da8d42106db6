"""`join`: ranks run out of data one after the other."""

from __future__ import annotations

from typing import Any

from bench.surface.calls.call import Calls, ones, ramp

__all__ = ["CALLS"]


def _uneven(hvd: Any, r: int, n: int, call: Any) -> Any:
    """Every rank makes one call; all but rank 0, which has joined by then, a second one."""
    results = [call("both")]
    if r:
        try:
            results.append(call("later"))
        except hvd.HorovodInternalError as error:
            results.append(type(error).__name__)
    return [results, hvd.join() >= 0]


CALLS: Calls = {
    "join": lambda hvd, r, n: hvd.join() in range(n),
    "join of all but rank 0": lambda hvd, r, n: [hvd.allreduce(ones(1), name="one more") if r == 0 else 0, hvd.join()],
    "Average": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.allreduce(ones(1) * (r + 1), name=name)),
    "Sum": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.allreduce(ones(1) * (r + 1), name=name, op=hvd.Sum)),
    "Min": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.allreduce(ones(1) * (r + 1), name=name, op=hvd.Min)),
    "broadcast": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.broadcast(ones(1), n - 1, name=name)),
    "allgather": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.allgather(ones(1) * r, name=name)),
    "alltoall": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.alltoall(ramp(n), name=name)),
    "reducescatter": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.reducescatter(ramp(n), name=name)),
    "join(-2)": lambda hvd, r, n: hvd.join(-2) >= 0,
}
