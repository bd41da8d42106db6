"""Gives an optimizer's communicators carriers for the device of its model; the only place that looks at CUDA."""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch

import comm_core
from overlap.job.groups import Membership
from overlap.job.session import Session
from overlap.transport.communicator import Communicator
from overlap.transport.cuda.alone import AloneCarrier
from overlap.transport.cuda.communicator import Carrier, DeviceCommunicator
from overlap.transport.cuda.math import kernels_on
from overlap.transport.cuda.nccl import NcclCarrier
from overlap.transport.cuda.route import Facts, Route, RouteError, Wish, choose, common_device, shares_cards
from overlap.transport.cuda.staged import StagedCarrier
from overlap.transport.cuda.streams import Streams
from overlap.transport.objects import allgather_object

__all__ = ["CudaCarriers", "fit_out"]

log = logging.getLogger("dear")


class CudaCarriers:
    """All carriers of `session`, which ends them. A channel that is leased again keeps the carrier it has."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.proxy(session)
        self._made: dict[tuple[Communicator, Route, torch.device], DeviceCommunicator] = {}

    def over(self, host: Communicator, route: Route, device: torch.device) -> DeviceCommunicator:
        """`host` with a carrier for `device`. On every rank of `host`."""
        found = self._made.get((host, route, device))
        if found is None:
            streams = Streams(device)
            kernels_on(streams.device)  # loaded now, not when a gradient needs them
            found = DeviceCommunicator(host, _carrier(host, route, streams), streams)
            self._made[host, route, device] = found
            self._session.adopt(found)
            if route is Route.NCCL:
                self._session.watchdog.watch(found)
        return found


_carriers: weakref.WeakKeyDictionary[Session, CudaCarriers] = weakref.WeakKeyDictionary()


def fit_out(
    session: Session,
    members: Membership,
    parameters: Sequence[tuple[str, torch.Tensor]],
    refusal: str = "",
    disorder: str = "",
) -> Membership:
    """`members` with carriers where parameters are on a GPU; as they are where parameters are on the CPU.

    On every rank of them.

    `parameters` are pairs of name and tensor; `refusal` says why their optimizer may not be on a GPU, where that is so.
    Raises on every rank, with the rank and the reason, :class:`RouteError` for devices that do not fit together, for a
    `refusal` where there is a GPU, for `disorder` (see :func:`.route.choose`) where gradients would travel by NCCL, and
    where ``DEAR_CUDA_TRANSPORT`` cannot be honoured.
    """
    facts = allgather_object(members.comm, _facts(parameters, refusal))
    route, reason = choose(facts, Wish(session.settings.cuda_transport), disorder)
    if route is Route.HOST:
        return members
    device = common_device(parameters)
    if members.comm.rank == 0:
        level = logging.WARNING if reason else logging.INFO
        log.log(level, "gradients on %s travel by route %s%s", device, route.value, f": {reason}" if reason else "")
    carriers = _carriers.setdefault(session, CudaCarriers(session))

    def over(hosts: Sequence[Communicator]) -> tuple[Communicator, ...]:
        return tuple(carriers.over(host, route, device) for host in hosts)

    reductions = over(members.reductions)
    gathers = reductions if members.gathers is members.reductions else over(members.gathers)
    groups = members.groups
    if groups is not None:
        comm, mine = over((groups.comm, groups.mine))
        groups = replace(groups, comm=comm, mine=mine)
    neighbours = None if members.post_forward is None else over((members.post_forward,))[0]
    return replace(members, reductions=reductions, gathers=gathers, groups=groups, post_forward=neighbours)


def _carrier(host: Communicator, route: Route, streams: Streams) -> Carrier:
    if route is Route.ALONE:
        return AloneCarrier(host)
    if route is Route.STAGED:
        return StagedCarrier(host, streams)
    if host.shard_size != host.size:
        raise comm_core.Unsupported(
            f"communicator {host.name} has {host.shard_size} shards for {host.size} ranks, which NCCL's has not; set "
            "DEAR_CUDA_TRANSPORT=staged"
        )
    core = comm_core.nccl(host.rank, host.size, streams.device, lambda mine: allgather_object(host, mine))
    return NcclCarrier(core, streams)


def _facts(parameters: Sequence[tuple[str, torch.Tensor]], refusal: str) -> Facts:
    """What this rank found. Nothing raises here: the other ranks are told."""
    try:
        device = common_device(parameters)
    except RouteError as error:
        return Facts(refusal=str(error))
    if device.type == "cpu":
        return Facts()
    if refusal:
        return Facts(device.type, refusal=f"{refusal}; they are on {device}")
    try:
        library = comm_core.find_nccl()
    except comm_core.Unsupported as error:
        return Facts(device.type, _card(device), trouble=str(error))
    if torch.version.hip is not None:
        return Facts(device.type, _card(device), trouble="this PyTorch is one for ROCm, and only NCCL is supported")
    return Facts(device.type, _card(device), library.version, shares_cards(os.environ))


def _card(device: torch.device) -> str:
    """The same for all ranks that use this GPU; a number alone says little where each rank sees GPUs of its own."""
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    identity = getattr(properties, "uuid", None)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return f"{socket.gethostname()}, {identity or f'device {index} of {seen}'}"
