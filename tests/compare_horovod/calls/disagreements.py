"""What rank 0 asks for, and what the others do under the same name. With one rank nobody disagrees."""

from __future__ import annotations

import torch

from tests.compare_horovod.calls.call import Calls, ones

__all__ = ["CALLS"]


def _type(r: int, other: torch.dtype) -> torch.dtype:
    return torch.float32 if r else other


CALLS: Calls = {
    "allreduce of other shapes": lambda hvd, r, n: hvd.allreduce(ones(3 if r else 2), name="shape"),
    "allreduce of as many elements": lambda hvd, r, n: hvd.allreduce(ones(2, 3) if r else ones(3, 2), name="turned"),
    "allreduce of other dimensions": lambda hvd, r, n: hvd.allreduce(ones(2, 2) if r else ones(2), name="dim"),
    "allreduce of other types": lambda hvd, r, n: hvd.allreduce(ones(2, dtype=_type(r, torch.float64)), name="type"),
    "allreduce, Average and Sum": lambda hvd, r, n: hvd.allreduce(ones(2), op=hvd.Sum if r else hvd.Average, name="a"),
    "allreduce, Min and Sum": lambda hvd, r, n: hvd.allreduce(ones(2), op=hvd.Sum if r else hvd.Min, name="m"),
    "allreduce, prescale_factor": lambda hvd, r, n: hvd.allreduce(ones(2), prescale_factor=1.0 + (r > 0), name="pre"),
    "allreduce, postscale_factor": lambda hvd, r, n: hvd.allreduce(
        ones(2), op=hvd.Sum, postscale_factor=1.0 + (r > 0), name="post"
    ),
    "broadcast from other roots": lambda hvd, r, n: hvd.broadcast(ones(2), min(r, 1), name="root"),
    "broadcast of other shapes": lambda hvd, r, n: hvd.broadcast(ones(3 if r else 2), 0, name="bshape"),
    "broadcast of other types": lambda hvd, r, n: hvd.broadcast(ones(2, dtype=_type(r, torch.int32)), 0, name="btype"),
    "allgather of other columns": lambda hvd, r, n: hvd.allgather(ones(2, 3 if r else 2), name="columns"),
    "allgather of other dimensions": lambda hvd, r, n: hvd.allgather(ones(2, 2) if r else ones(2), name="gdim"),
    "allgather of other types": lambda hvd, r, n: hvd.allgather(ones(2, dtype=_type(r, torch.int32)), name="gtype"),
    "alltoall of other columns": lambda hvd, r, n: hvd.alltoall(ones(n, 3 if r else 2), name="acolumns"),
    "reducescatter of other rows": lambda hvd, r, n: hvd.reducescatter(ones(3 if r else 2, 2), name="rows"),
    "reducescatter, Average and Sum": lambda hvd, r, n: hvd.reducescatter(
        ones(2, 2), op=hvd.Sum if r else hvd.Average, name="rop"
    ),
    "a group's shapes": lambda hvd, r, n: hvd.grouped_allreduce([ones(2), ones(3 if r else 2)], name="gshape"),
    "a group's size": lambda hvd, r, n: hvd.grouped_allreduce([ones(2)] * (3 if r else 2), name="gsize"),
    "another operation": lambda hvd, r, n: (hvd.allreduce if r else hvd.allgather)(ones(2), name="operation"),
}
