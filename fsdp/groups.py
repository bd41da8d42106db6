"""Arguments for jobs of several hosts, where communication within a host is faster than between hosts.

            rank 0  1 | 2  3        two hosts of two ranks
group_sharding              a rank has 1/2 of the model; gradients are averaged over 0 and 2, and over 1 and 3
communication_with_groups   a rank has 1/4; each operation runs within hosts and between them, one after the other
"""

from __future__ import annotations

from typing import Any

from overlap.horovod.job import cross_rank, init
from overlap.horovod.mesh import Mesh
from overlap.job.session import current, is_initialized
from overlap.transport.objects import allgather_object

__all__ = ["gen_fsdp_args"]


def gen_fsdp_args(nnodes: int, nproc_per_node: int, gsdp_type: str, model_type: str | None = None) -> dict[str, Any]:
    """Keyword arguments of :class:`fsdp.FullyShardedDataParallel` for `nnodes` hosts of `nproc_per_node` ranks each.

    Args:
        nnodes: the number of hosts.
        nproc_per_node: ranks on each; those of a host have consecutive numbers.
        gsdp_type: ``"group_sharding"``: parameters are sharded among the ranks of a host, and gradients averaged over
            hosts, too. ``"communication_with_groups"``: they are sharded among all ranks, by operations within hosts and
            between them. Anything else, such as ``"none"``: all ranks, in one level.
        model_type: has no effect: memory for whole parameters follows from the model, whichever it is.

    On every rank of the job, which this process joins unless it has. Raises ``ValueError`` on every rank where the job has
    another number of ranks, or ranks of a host do not have consecutive numbers.
    """
    if gsdp_type not in ("group_sharding", "communication_with_groups"):
        return {}
    if not is_initialized():
        init()
    session = current()
    size = session.comm.size
    why = _why_not(nnodes, nproc_per_node, allgather_object(session.control, cross_rank()))
    if why is not None:
        raise ValueError(f"gen_fsdp_args(nnodes={nnodes}, nproc_per_node={nproc_per_node}) in a job of {size}: {why}")
    if gsdp_type == "group_sharding":
        return {"mesh": Mesh(hosts=nnodes, ranks=nproc_per_node)}
    return {"two_level": nproc_per_node}


def _why_not(nnodes: int, nproc_per_node: int, hosts: list[int]) -> str | None:
    """What is wrong with the numbers in a job whose ranks are on `hosts`, by rank (pure)."""
    if nnodes < 1 or nproc_per_node < 1 or nnodes * nproc_per_node != len(hosts):
        return f"{nnodes} × {nproc_per_node} is {nnodes * nproc_per_node}; give numbers whose product is {len(hosts)}"
    if len(set(hosts)) == 1:
        return None  # one machine stands for several
    for first in range(0, len(hosts), nproc_per_node):
        block = hosts[first : first + nproc_per_node]
        if len(set(block)) > 1:
            return (
                f"ranks {first} to {first + nproc_per_node - 1} should be on one host and are on {len(set(block))}: "
                "start the ranks of a host one after the other, as mpirun does with --map-by slot"
            )
    return None
