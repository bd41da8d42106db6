"""Translates arguments of fairscale-CO2's ``CO2DistributedDataParallel`` into this package's. Pure.

Each counts, or what it asks for is so anyway, or it raises with what stands in its place. Nothing is passed over.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from co2.equations import Co2Rule
from co2.schedule import Schedule

__all__ = ["cut", "in_our_words", "refusal_of_all", "told_of_cut"]

#: Of arguments that cannot count here: what they may be, as where they are left out, and why they cannot be anything else.
_ONLY: Mapping[str, tuple[Any, str]] = {
    "outer_momentum_memory_efficient": (True, "the outer state is split over all ranks, 1/P on each"),
    "outer_momentum_num_shards": (None, "the outer state is in as many shards as there are ranks"),
    "co2_use_streams": (False, "averages travel on a thread of their own, between CPUs"),
    "verbose": (False, "DEAR_LOG_LEVEL=info logs what is decided"),
    "profile_mode": (False, "co2.start_timeline(path) writes what a step takes"),
    "global_group": (
        None,
        "all ranks of the job take part; co2.init(comm=group) chooses them, before the model is wrapped",
    ),
    "master_group": (None, "groups follow from nprocs_per_node"),
    "local_node_group": (None, "groups follow from nprocs_per_node"),
}


def in_our_words(given: Mapping[str, Any], rank: int, size: int) -> tuple[Schedule, Co2Rule]:
    """The schedule and the outer rule that the class's arguments ask for, on `rank` of `size`.

    Raises ``ValueError``, ``TypeError``.
    """
    for name, (only, why) in _ONLY.items():
        if given[name] is not only and given[name] != only:
            raise ValueError(f"{name}={given[name]!r}: {why}; leave it out")
    _check_algorithm(given["co2_base_algorithm"])
    for name, mine in (("process_rank", rank), ("process_world_size", size)):
        if given[name] is not None and given[name] != mine:
            raise ValueError(f"{name}={given[name]!r}, and the launcher says {mine}; leave it out")
    if given["comm_device"] is not None and torch.device(given["comm_device"]).type != "cpu":
        raise ValueError(f"comm_device={given['comm_device']!r}: averages travel between CPUs; leave it out")
    steps, outer_steps = given["localsgd_frequency"], given["outer_frequency"]
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"localsgd_frequency should be a number of steps, at least 1, and is {steps!r}")
    if outer_steps is not None and outer_steps != steps:
        raise ValueError(
            f"outer_frequency={outer_steps!r} and localsgd_frequency={steps}: every round of localsgd_frequency steps ends "
            "in an outer step, as in the paper; leave outer_frequency out"
        )
    _check_numbers(given)
    clips, threshold = given["co2_clip"], given["co2_clip_threshold"]
    if not clips and threshold != 1.0:
        raise ValueError(f"co2_clip_threshold={threshold!r} counts with co2_clip=True alone: give both or neither")
    if not threshold > 0:
        raise ValueError(f"co2_clip_threshold should be above 0 and is {threshold}")
    clip = threshold if clips else None
    schedule = Schedule(steps, option="localsgd_frequency")
    return schedule, Co2Rule(given["outer_lr"], given["outer_momentum"], clip, given["co2_gap_penalty"])


def refusal_of_all(refusals: Sequence[tuple[type[Exception], str] | None]) -> Exception | None:
    """The error that all ranks raise, from what each would: the first one's, with its rank unless all are alike."""
    found = [(rank, refusal) for rank, refusal in enumerate(refusals) if refusal is not None]
    if not found:
        return None
    rank, (kind, message) = found[0]
    return kind(message if set(refusals) == {refusals[0]} else f"on rank {rank}: {message}")


def _check_numbers(given: Mapping[str, Any]) -> None:
    for name in ("outer_momentum", "outer_lr", "co2_clip_threshold", "co2_gap_penalty"):
        value, may_be_flag = given[name], name == "co2_gap_penalty"
        if not isinstance(value, numbers.Real) or (isinstance(value, bool) and not may_be_flag):
            raise TypeError(f"{name} should be a number{', True or False' * may_be_flag} and is {value!r}")
    if not isinstance(given["co2_clip"], bool):
        raise TypeError(f"co2_clip should be True or False and is {given['co2_clip']!r}")


def _check_algorithm(wanted: Any) -> None:
    name = getattr(wanted, "value", wanted)
    if wanted is not None and str(name).lower() != "localsgd":
        raise ValueError(
            f"co2_base_algorithm={wanted!r}: between averages ranks make local steps (LOCALSGD), no gossip; leave it out"
        )


def cut(wanted: int, ranks_of_hosts: Sequence[int], size: int) -> int:
    """The number of ranks in a group: `wanted`, if each host has as many.

    Where a host has fewer, the most that each host has and that divide `size`.

    Raises ``ValueError`` for a number that no host is too small for, and that does not divide `size`.
    """
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise ValueError(f"nprocs_per_node should be a number of ranks, at least 1, and is {wanted!r}")
    smallest = min(ranks_of_hosts)
    if wanted > smallest:
        return max(ranks for ranks in range(1, smallest + 1) if size % ranks == 0)
    if size % wanted:
        raise ValueError(f"nprocs_per_node should divide the number of ranks, {size}, and is {wanted}")
    return wanted


def told_of_cut(wanted: int, ranks_of_hosts: Sequence[int], size: int) -> str | None:
    """A message for the user where :func:`cut` gives another number than `wanted`; else None."""
    ranks, smallest = cut(wanted, ranks_of_hosts, size), min(ranks_of_hosts)
    if ranks == wanted:
        return None
    told = f"nprocs_per_node={wanted}, and a host has {smallest} rank(s): gradients are averaged in groups of {ranks}"
    if ranks < smallest:
        told += f", the most up to {smallest} that divide the {size} ranks"
    if ranks == size > 1:
        told += ", which is all of them: with nprocs_per_node=1 each rank steps alone"
    return told
