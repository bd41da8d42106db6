"""What fairscale-CO2's arguments are here, and what is said of those that cannot be had."""

from __future__ import annotations

import enum
import inspect
from typing import Any

import pytest
import torch

from co2.data_parallel import CO2DistributedDataParallel
from co2.equations import Co2Rule
from co2.fairscale_arguments import cut, in_our_words, told_of_cut
from co2.schedule import Schedule

DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(CO2DistributedDataParallel).parameters.items()
    if name not in ("module", "nprocs_per_node", "broadcast_buffers")
}


class _Algorithm(enum.Enum):
    LOCALSGD = "localsgd"
    SGP = "sgp"


def _words(**given: Any) -> tuple[Schedule, Co2Rule]:
    return in_our_words({**DEFAULTS, **given}, 1, 4)


def test_arguments_stand_in_the_order_of_the_original() -> None:
    assert list(inspect.signature(CO2DistributedDataParallel).parameters)[:12] == [
        "module",
        "nprocs_per_node",
        "broadcast_buffers",
        "co2_base_algorithm",
        "outer_momentum",
        "outer_momentum_memory_efficient",
        "outer_frequency",
        "outer_lr",
        "outer_momentum_num_shards",
        "localsgd_frequency",
        "co2_clip",
        "co2_gap_penalty",
    ]


def test_what_counts() -> None:
    assert _words()[0].option == "localsgd_frequency", "in what is said of a round's length"
    assert _words() == (Schedule(3), Co2Rule(1.0, 0.5, None, 1.0))
    told = {
        "outer_momentum": 0.2,
        "outer_lr": 0.8,
        "localsgd_frequency": 5,
        "outer_frequency": 5,
        "co2_gap_penalty": True,
    }
    assert _words(**told, co2_clip=True, co2_clip_threshold=0.3) == (Schedule(5), Co2Rule(0.8, 0.2, 0.3, True))
    same = {"process_rank": 1, "process_world_size": 4, "comm_device": torch.device("cpu")}
    assert _words(co2_base_algorithm=_Algorithm.LOCALSGD, outer_momentum_memory_efficient=True, **same) == _words()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"outer_frequency": 48},
            "outer_frequency=48 and localsgd_frequency=3: every round of localsgd_frequency steps",
        ),
        ({"outer_momentum_memory_efficient": False}, "the outer state is split over all ranks"),
        ({"outer_momentum_num_shards": 32}, "outer_momentum_num_shards=32: the outer state is in as many shards as"),
        ({"co2_clip_threshold": 0.5}, "co2_clip_threshold=0.5 counts with co2_clip=True alone"),
        ({"co2_use_streams": True}, "co2_use_streams=True: averages travel on a thread of their own"),
        ({"verbose": True}, "DEAR_LOG_LEVEL=info"),
        ({"profile_mode": True}, "start_timeline"),
        ({"process_rank": 0}, "process_rank=0, and the launcher says 1"),
        ({"process_world_size": 8}, "process_world_size=8, and the launcher says 4"),
        ({"global_group": object()}, r"co2.init\(comm=group\) chooses them"),
        ({"master_group": object()}, "groups follow from nprocs_per_node"),
        ({"local_node_group": object()}, "groups follow from nprocs_per_node"),
        ({"comm_device": "cuda"}, "comm_device='cuda': averages travel between CPUs"),
        ({"co2_base_algorithm": _Algorithm.SGP}, "ranks make local steps"),
        ({"localsgd_frequency": 0}, "localsgd_frequency should be a number of steps, at least 1, and is 0"),
        ({"outer_momentum": 1.0}, "outer_momentum should be at least 0 and below 1"),
    ],
)
def test_what_cannot_be_had_says_why(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _words(**given)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("outer_momentum", "a number"),
        ("outer_lr", "a number"),
        ("co2_clip_threshold", "a number"),
        ("co2_gap_penalty", "a number, True or False"),
        ("co2_clip", "True or False"),
    ],
)
def test_what_is_of_the_wrong_kind(name: str, kind: str) -> None:
    for value in ("auto", None):
        with pytest.raises(TypeError, match=f"^{name} should be {kind} and is {value!r}$"):
            _words(**{name: value})
    with pytest.raises(ValueError, match="co2_clip_threshold should be above 0 and is -1"):
        _words(co2_clip=True, co2_clip_threshold=-1)


def test_every_argument_but_the_first_three_is_looked_at() -> None:
    """Each of them changes what comes out, or raises, for some other value than its default."""
    others: dict[str, Any] = {"outer_momentum": 0.1, "outer_lr": 0.5, "localsgd_frequency": 7, "co2_gap_penalty": 2.0}
    others |= {"co2_clip": True, "co2_clip_threshold": 3.0, "outer_frequency": 9, "comm_device": "meta"}
    for name, default in DEFAULTS.items():
        other = others.get(name, "another")
        assert other != default
        try:
            found = _words(**{name: other})
        except (TypeError, ValueError):
            continue
        assert found != _words(), name


def test_a_group_is_no_larger_than_a_host() -> None:
    assert cut(8, [2, 2], 2) == 2
    assert cut(8, [8] * 16, 16) == 8
    assert cut(2, [4] * 8, 8) == 2
    assert cut(8, [4, 4, 4, 4, 2, 2], 6) == 2
    assert cut(8, [3, 3, 3, 2, 2], 5) == 1
    assert cut(8, [5, 5, 5, 5, 5, 4, 4, 4, 4], 9) == 3
    with pytest.raises(ValueError, match="should divide the number of ranks, 4, and is 3"):
        cut(3, [4] * 4, 4)
    for wrong in (0, -1, True, 1.5, None):
        with pytest.raises(ValueError, match="nprocs_per_node should be a number of ranks, at least 1"):
            cut(wrong, [2], 2)  # type: ignore[arg-type]


def test_what_is_said_of_a_smaller_group() -> None:
    assert told_of_cut(2, [4] * 4, 4) is None
    told = "nprocs_per_node=8, and a host has 2 rank(s): gradients are averaged in groups of"
    assert told_of_cut(8, [2] * 4, 4) == f"{told} 2"
    assert told_of_cut(8, [3, 3, 3, 2, 2], 5) == f"{told} 1, the most up to 2 that divide the 5 ranks"
    assert told_of_cut(8, [2] * 2, 2) == f"{told} 2, which is all of them: with nprocs_per_node=1 each rank steps alone"
