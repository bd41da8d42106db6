"""Process groups of torch.distributed that their members alone make."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["made_by_members"]


def made_by_members(ranks: Sequence[int], backend: str, store: Any, name: str, limit: timedelta) -> Any:
    """The group over `backend` of these `ranks` of the default group, which this one is among. On every one of them.

    All give the same `name`, which no other group has in `store`. By ``new_group(use_local_synchronization=True)`` a rank
    names it by how many groups it has, and where ranks have different numbers of them each waits for ever. `limit`: for an
    operation.
    """
    make: Any = dist.distributed_c10d._new_process_group_helper
    mine, members = ranks.index(dist.get_rank()), list(ranks)
    made, _ = make(len(members), mine, members, dist.Backend(backend), store, name, timeout=limit)
    dist.distributed_c10d._world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(members)}
    return made
