"""How many threads a rank takes of its host's cores."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

import comm_core
from overlap.job import cores, session
from overlap.transport.native import NativeCommunicator


@pytest.mark.parametrize(
    ("mine", "everyones", "limit", "expected"),
    [
        (range(16), [range(16)] * 4, math.inf, 4),
        (range(2), [range(2)] * 3, math.inf, 1),  # more ranks than cores
        (range(4), [range(4), range(4, 8)], math.inf, 4),  # cores of its own
        (range(8), [range(8), range(8), range(8, 16), range(8, 16)], math.inf, 4),  # two of them on each socket
        (range(8), [range(8), range(4)], math.inf, 6),  # four alone, and half of four
        (range(64), [range(64)] * 2, 6.0, 3),  # a container with 6 cores' time
        (range(64), [range(64)] * 2, 1.5, 1),
        (range(3), [range(3)] * 3, math.inf, 1),  # thirds add up
    ],
)
def test_a_rank_takes_its_share(mine: range, everyones: list[range], limit: float, expected: int) -> None:
    assert cores.among(mine, everyones, limit) == expected


def test_hyperthreads_are_no_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 5, 7})
    for cpu, siblings in ((0, "0,4"), (4, "0,4"), (1, "1-5:4"), (5, "1,5")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert cores.cores() == (0, 1, 7)  # 7 does not say


def test_a_container_says_how_much_time_it_has(tmp_path: Path) -> None:
    assert cores.quota("150000 100000") == 1.5
    assert cores.quota("max 100000") == cores.quota("-1 100000") == math.inf
    pod = tmp_path / "pods" / "mine"
    pod.mkdir(parents=True)
    (pod / "cpu.max").write_text("max 100000\n")
    (tmp_path / "pods" / "cpu.max").write_text("400000 100000\n")
    assert cores.limit_in("0::/pods/mine\n", tmp_path) == 4.0
    assert cores.limit_in("0::/\n", tmp_path) == math.inf
    old = tmp_path / "cpu" / "docker"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("250000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.limit_in("3:cpuset:/other\n2:cpu,cpuacct:/docker\n0::/\n", tmp_path) == 2.5


@pytest.mark.parametrize(("told", "local_size", "parts"), [("", 2, 2), ("", 1, 0), ("7", 2, 0)])
def test_init_shares_the_cores_where_the_launcher_has_not(
    told: str, local_size: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(cores, "cores", lambda: tuple(range(64)))
    monkeypatch.setattr(cores, "limit", lambda: math.inf)
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    session._share_cores(NativeCommunicator(comm_core.local()), [0], local_size)
    assert chosen == ([64 // parts] if parts else [])
