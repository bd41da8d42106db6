"""The ranks that fairscale's interfaces train with: a torch.distributed process group, or this process alone."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlap.job.launch import detect
from overlap.job.session import current, is_initialized

__all__ = ["Ranks", "ranks_of"]


def ranks_of(group: Any) -> Ranks:
    """The ranks in `group`; by default torch.distributed's default group, or this process where it is alone.

    On every rank of the group. Raises ``RuntimeError`` where several processes were started and none of them has made a
    group yet, ``TypeError`` for what is no group, or a group without this rank.
    """
    if not (dist.is_available() and dist.is_initialized()):
        size = current().comm.size if is_initialized() else detect(os.environ).size
        spawned = not is_initialized() and multiprocessing.parent_process() is not None
        if size > 1 or spawned or group is not None:
            who = "was spawned by another one" if spawned and size == 1 else f"is one of {size}"
            raise RuntimeError(
                f"torch.distributed has no process group, and this process {who}: call "
                "torch.distributed.init_process_group() or oss.init() first"
            )
        return Ranks(None)
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):
        raise TypeError(
            "the process group should be one of torch.distributed's with this rank in it, as new_group() gives to its "
            f"members, and is {group!r}"
        )
    return Ranks(chosen)


# gloo's threads let go of a tensor a moment after its operation is done. One that does so while Python ends aborts the
# process, so a script that ends right behind its last step() waits for them.
_LET_GO_SECONDS = 0.2


@functools.cache
def _wait_at_exit() -> None:
    atexit.register(time.sleep, _LET_GO_SECONDS)


class Ranks:
    """The members of `group`, numbered from 0; without a group, this process alone. All methods: on every member."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.members = [0] if group is None else dist.get_process_group_ranks(group)

    def reduce(self, values: Sequence[float], near: torch.device, op: Any = dist.ReduceOp.MAX) -> list[float]:
        """Reduce each number over the members, in float64, on the device `near`, where the parameters are."""
        if self.size == 1:
            return list(values)
        _wait_at_exit()
        flat = torch.tensor(values, dtype=torch.float64, device=near)
        dist.all_reduce(flat, op, group=self.group)
        return flat.tolist()

    def broadcast(self, values: torch.Tensor, root: int) -> Any:
        """Start to overwrite `values` with those of member `root`; returns what to ``wait()`` for."""
        assert self.group is not None, "a process alone has nothing to send"
        _wait_at_exit()
        return dist.broadcast(values, dist.get_global_rank(self.group, root), group=self.group, async_op=True)

    def gather(self, value: Any, recipient: int, near: torch.device) -> list[Any] | None:
        """Every member's `value`, pickled on the way, on member `recipient`, or on all with -1; None elsewhere."""
        if self.size == 1:
            return [value]
        assert self.group is not None, "there are others"
        _wait_at_exit()
        found: list[Any] | None = [None] * self.size if recipient in (-1, self.rank) else None
        with torch.cuda.device(near) if near.type == "cuda" else contextlib.nullcontext():  # NCCL sends from it
            if recipient == -1:
                dist.all_gather_object(found, value, group=self.group)
            else:
                dist.gather_object(value, found, dist.get_global_rank(self.group, recipient), group=self.group)
        return found
