"""Decides how a model's tensors travel between ranks, from what every rank found (pure).

memory of the host              HOST     the launcher's own transport
one rank, a GPU                 ALONE    nothing travels
NCCL, and a GPU for each rank   NCCL     from GPU to GPU
otherwise                       STAGED   through pinned memory of the host, over the launcher's transport
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["Facts", "Route", "RouteError", "Wish", "choose", "common_device", "refuse_capture", "shares_cards"]

#: The first NCCL that allows several ranks on one GPU, and the variable that makes it.
_SHARED_CARDS = (2, 30, 0)
SHARED_CARDS_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


class RouteError(ValueError):
    """Ranks hold their models in different places, or a route that was asked for cannot be had."""


class Route(Enum):
    HOST = "host"
    ALONE = "alone"
    NCCL = "nccl"
    STAGED = "staged"


class Wish(Enum):
    """The values of ``DEAR_CUDA_TRANSPORT``."""

    AUTO = "auto"
    NCCL = "nccl"
    STAGED = "staged"


@dataclass(frozen=True, slots=True)
class Facts:
    """The findings of one rank.

    `trouble` says why it cannot use NCCL, `refusal` why its optimizer cannot be had at all.
    """

    device: str = "cpu"  # the type of the model's
    card: str = ""  # names a GPU, the same for all ranks that use it
    nccl: tuple[int, int, int] = (0, 0, 0)
    shares: bool = False  # several ranks on one GPU are allowed by the environment
    trouble: str | None = None
    refusal: str | None = None


def common_device(named: Iterable[tuple[str, torch.Tensor]]) -> torch.device:
    """The CUDA device of the parameters, the CPU where none is on one; some may be on the CPU beside it.

    Raises :class:`RouteError` for two CUDA devices, and for kinds that nothing here moves.
    """
    first: tuple[str, torch.device] | None = None
    for name, tensor in named:
        if tensor.device.type == "cpu":
            continue
        if tensor.device.type != "cuda":
            raise RouteError(
                f"parameter {name!r} is on {tensor.device}; only CPU and CUDA parameters can be trained: move the model"
            )
        if first is not None and tensor.device != first[1]:
            raise RouteError(
                f"parameter {first[0]!r} is on {first[1]} and {name!r} on {tensor.device}; move the model to one of them, "
                "or give each device an optimizer of its own"
            )
        first = first or (name, tensor.device)
    return torch.device("cpu") if first is None else first[1]


def choose(facts: Sequence[Facts], wish: Wish, disorder: str = "") -> tuple[Route, str]:
    """The route of all ranks, and why it is no better one. `facts` are in rank order, the same on every rank.

    `disorder`, the same on every rank, says why operations are not issued in one order on all ranks, which NCCL needs.

    Raises :class:`RouteError` where devices differ, where `wish` insists on NCCL that cannot be used, and where NCCL could
    be used but for `disorder`.
    """
    for rank, found in enumerate(facts):
        if found.refusal is not None:
            raise RouteError(f"rank {rank}: {found.refusal}")
    for rank, found in enumerate(facts):
        if found.device != facts[0].device:
            raise RouteError(
                f"the model is on {facts[0].device} on rank 0 and on {found.device} on rank {rank}; move it to the same "
                "kind of device on all ranks"
            )
    if facts[0].device == "cpu":
        return Route.HOST, ""
    if len(facts) == 1:
        return Route.ALONE, ""
    if wish is Wish.STAGED:
        return Route.STAGED, "DEAR_CUDA_TRANSPORT=staged asks for it"
    reason = _against_nccl(facts)
    if reason is None:
        if disorder:
            raise RouteError(disorder)
        return Route.NCCL, ""
    if wish is Wish.NCCL:
        raise RouteError(f"DEAR_CUDA_TRANSPORT=nccl cannot be had: {reason}")
    return Route.STAGED, reason


def _against_nccl(facts: Sequence[Facts]) -> str | None:
    for rank, found in enumerate(facts):
        if found.trouble is not None:
            return f"rank {rank}: {found.trouble}"
    for rank, found in enumerate(facts):
        if found.nccl != facts[0].nccl:
            return f"rank 0 has NCCL {_dotted(facts[0].nccl)} and rank {rank} has NCCL {_dotted(found.nccl)}"
    cards: dict[str, int] = {}
    for rank, found in enumerate(facts):
        other = cards.setdefault(found.card, rank)
        if other == rank:
            continue
        both = f"ranks {other} and {rank} share a GPU ({found.card})"
        if found.nccl < _SHARED_CARDS:
            return (
                f"{both}, which NCCL {_dotted(found.nccl)} does not allow; give each rank one by torch.cuda.set_device"
            )
        if not (found.shares and facts[other].shares):
            return f"{both}; give each rank one by torch.cuda.set_device, or set {SHARED_CARDS_VARIABLE}=1"
    return None


def refuse_capture(capturing: bool) -> str | None:
    """The reason why an operation cannot be issued now; None where it can.

    Torch's own collectives may be captured into a CUDA graph: they leave no trace on the host. Ours are agreed, counted
    and watched there, once per call, and a replay is no call.
    """
    if not capturing:
        return None
    return (
        "this stream is being captured into a CUDA graph, and the host, which sees to the order of collectives and watches "
        "them, takes no part in its replays; capture forward and backward without optimizer and step() "
        "(torch.cuda.make_graphed_callables), or compile with torch.compile"
    )


def _dotted(version: Sequence[int]) -> str:
    return ".".join(str(part) for part in version)


def shares_cards(environ: Mapping[str, str]) -> bool:
    """Whether the environment lets several ranks use one GPU with NCCL."""
    return environ.get(SHARED_CARDS_VARIABLE, "0") == "1"
