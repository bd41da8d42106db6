"""Among which ranks co2 averages gradients in every step: those of one host, or of blocks of a given size."""

from __future__ import annotations

from overlap.job.groups import Membership
from overlap.job.session import Session
from overlap.transport.objects import allgather_object

__all__ = ["check_nprocs", "node_groups"]


def check_nprocs(nprocs: int | None, size: int) -> None:
    """Raise ``ValueError`` unless `size` ranks are blocks of `nprocs`."""
    if nprocs is not None and (not isinstance(nprocs, int) or nprocs < 1 or size % nprocs):
        raise ValueError(f"nprocs_per_node should divide the number of ranks, {size}, and is {nprocs!r}")


def node_groups(session: Session, nprocs: int | None) -> Membership:
    """This rank's group, of ranks n to n + `nprocs` - 1. None: of one host, or each rank alone where there is one host.

    On every rank of the job.
    """
    rank, size = session.comm.rank, session.comm.size
    colors = allgather_object(session.control, session.cross_rank if nprocs is None else rank // nprocs)
    if nprocs is None and len(set(colors)) == 1:
        colors = list(range(size))
    members = tuple(other for other, color in enumerate(colors) if color == colors[rank])
    if len(members) == size:
        everyone, comm, calls = session.channels.lease(3)
    else:
        everyone, comm, calls = *session.channels.lease(1), *session.channels.lease(2, colors)
    lane = (comm,)
    return Membership(lane, lane, calls, members, everyone)
