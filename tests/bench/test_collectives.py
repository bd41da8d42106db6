"""A run is judged by its numbers alone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.collectives import __main__ as program
from bench.collectives.bars import judge, judge_backend
from bench.collectives.levels import LevelRow, judge_levels, level_row, level_table
from bench.collectives.plain import ROUNDS, PlainRing
from bench.collectives.rows import Row, row_of, table
from bench.program import sent_bytes
from tests.harness import ROOT


def _row(operation: str = "all_gather", nbytes: int = 2**20, **figures: float | None) -> Row:
    base = {
        "n": 5,
        "ms": 1.0,
        "low_ms": 0.9,
        "high_ms": 1.1,
        "bus_mb_per_s": 100.0,
        "gloo_ms": 1.0,
        "cpu_ns_per_byte": 1.0,
        "cores_busy": 0.5,
    }
    ratios = {"to_gloo": 1.0, "to_wire": 1.0, "to_plain": 1.0, "cpu_to_gloo": 1.0}
    return Row(operation=operation, bytes=nbytes, **{**base, **ratios, **figures})  # type: ignore[arg-type]


def test_every_bar_can_be_missed() -> None:
    for figures in ({"to_plain": 1.09}, {"to_gloo": 1.04}, {"cpu_to_gloo": 1.01}):
        verdicts = judge([_row(**figures)], 2, "mpi")
        assert [verdict.met for verdict in verdicts].count(False) == 1, figures
    assert all(verdict.met for verdict in judge([_row(to_plain=1.08)], 2, "mpi"))
    assert all(verdict.met for verdict in judge([_row(to_plain=1.25)], 4, "mpi"))
    assert not all(verdict.met for verdict in judge([_row(to_plain=1.06)], 2, "tcp"))
    # A stream is no limit for single messages, and between processes of one machine there is no wire.
    assert all(verdict.met for verdict in judge([_row(to_wire=1.5)], 2, "tcp"))
    assert len(judge([_row(to_wire=None, to_plain=9.0)], 2, "tcp")) == 2


def test_small_messages_are_only_compared_with_gloo() -> None:
    verdicts = judge([_row(nbytes=4096, to_wire=9.0, to_plain=9.0, to_gloo=1.4, cpu_to_gloo=3.0)], 2, "mpi")
    assert [verdict.met for verdict in verdicts] == [True]


def test_bars_speak_of_the_rings_only() -> None:
    assert judge([_row("broadcast", to_wire=9.0, to_plain=9.0, to_gloo=9.0)], 2, "mpi") == []


def test_each_bar_of_the_backend_can_be_missed() -> None:
    for operation, bar in (("reduce_scatter", 0.55), ("all_gather", 1.0), ("all_reduce", 1.0)):
        assert [one.met for one in judge_backend([_row(operation, to_gloo=bar)])] == [True]
        assert [one.met for one in judge_backend([_row(operation, to_gloo=bar + 0.01)])] == [False]
    assert judge_backend([_row("broadcast", to_gloo=9.0), _row("all_reduce", nbytes=4096, to_gloo=9.0)]) == []


def _measured(ours: list[float], gloo: list[float]) -> dict[str, Any]:
    return {
        "operation": "all_gather",
        "bytes": 1000,
        "ranks": 2,
        "wire_share": 0.5,
        "seconds": {"ours": ours, "gloo": gloo},
        "cores_busy": 0.5,
        "cpu_seconds": {"ours": [1.0] * len(ours), "gloo": [2.0] * len(gloo)},
    }


def test_rows_are_medians_of_pairs() -> None:
    row = row_of(_measured([1.0, 2.0, 9.0], [2.0, 2.0, 3.0]), goodput_bytes=250.0)
    assert (row.ms, row.to_gloo, row.to_wire, row.cpu_to_gloo) == (2000.0, 1.0, 1.0, 0.5)
    assert "all_gather" in table([row])


def test_six_pairs_have_an_interval() -> None:
    ours = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    measured = _measured(ours, [1.0] * 6)
    measured["seconds"]["plain"] = [2.0] * 6
    measured["cpu_seconds"]["plain"] = [9.0] * 6
    row = row_of(measured, None)
    assert (row.gloo_interval, row.plain_interval) == ((1.0, 1.5), (0.5, 0.75))
    assert row_of(_measured(ours[:5], [1.0] * 5), None).gloo_interval is None


def test_quartiles_lie_within_what_was_measured() -> None:
    row = row_of(_measured([0.1, 0.9], [1.0, 1.0]), goodput_bytes=None)
    assert (row.low_ms, row.high_ms) == (pytest.approx(300), pytest.approx(700))


# - Plain TCP in the pattern of a ring


class _Rank:
    """One of several ranks in threads of this process; `allgather_object` is replaced."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("nbytes", [6, 2**16, 3 * 2**20])
def test_plain_tcp_sends_what_a_ring_does(size: int, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank receives the parts of the one before it, whole and in order, and all ranks at once."""
    addresses, met = [None] * size, threading.Barrier(size)

    def gathered(comm: Any, address: Any) -> list[Any]:
        addresses[comm.rank] = address
        met.wait(10)
        return list(addresses)

    monkeypatch.setattr("bench.collectives.plain.allgather_object", gathered)

    def content(rank: int, count: int) -> bytes:
        return (bytes(range(251)) * (count // 251 + 2))[rank : rank + count]

    def run(rank: int) -> bool:
        ring = PlainRing(_Rank(rank, size), "127.0.0.1", 4)  # type: ignore[arg-type]
        ring.pass_on(nbytes, ROUNDS["reduce_scatter"])
        count = len(ring._sent)
        ring._sent[:] = content(rank, count)
        ring.pass_on(nbytes, ROUNDS["all_reduce"])
        met.wait(10)
        ring.close()
        return count == nbytes // size and ring._received == content((rank - 1) % size, count)

    with ThreadPoolExecutor(size) as ranks:
        assert all(ranks.map(run, range(size)))


def test_a_ring_is_compared_with_plain_tcp_pair_by_pair() -> None:
    measured = _measured([1.0, 2.0, 9.0], [2.0, 2.0, 3.0])
    assert row_of(measured, None).to_plain is None
    measured["seconds"]["plain"] = [0.5, 2.0, 3.0]
    measured["cpu_seconds"]["plain"] = [9.0] * 3
    row = row_of(measured, None)
    assert (row.plain_ms, row.to_plain, row.to_gloo) == (2000.0, 2.0, 1.0)
    assert "TCP ms" in table([row])


# - Two levels


def _level_row(nbytes: int = 2**20, **figures: float) -> LevelRow:
    base = {"n": 5, "ms": 3.0, "low_ms": 2.9, "high_ms": 3.1, "flat_ms": 4.5, "hosts_ms": 3.0, "to_flat": 0.67}
    sent = {"sent_mb": 0.53, "flat_sent_mb": 0.79, "hosts_sent_mb": 0.53}
    return LevelRow("all_reduce", nbytes, **{**base, **sent, **figures})  # type: ignore[arg-type]


def test_rows_of_two_levels_are_medians_of_pairs() -> None:
    seconds = {"levels": [1.0, 2.0, 9.0], "flat": [2.0, 2.0, 10.0], "hosts": [1.0, 1.0, 1.0]}
    sent = {"levels": [2e6, 2e6, 5e6], "flat": [3e6] * 3, "hosts": [1e6] * 3}
    row = level_row({"operation": "all_reduce", "bytes": 2**21, "seconds": seconds, "sent": sent})
    assert (row.n, row.ms, row.flat_ms, row.to_flat) == (3, 2000.0, 2000.0, 0.9)
    assert (row.sent_mb, row.flat_sent_mb, row.hosts_sent_mb, row.to_hosts) == (2.0, 3.0, 1.0, 2.0)
    assert "all_reduce           2    3   2000.00" in level_table([row])
    assert row.flat_interval is None
    seconds = {"levels": [1.0, 2.0] * 3, "flat": [2.0] * 6, "hosts": [1.0] * 6}
    assert level_row({"operation": "all_reduce", "bytes": 2**21, "seconds": seconds, "sent": sent}).flat_interval == (
        0.5,
        1.0,
    )


def test_each_bar_of_two_levels_can_be_missed() -> None:
    assert [one.met for one in judge_levels([_level_row()])] == [True, True]
    assert [one.met for one in judge_levels([_level_row(to_flat=0.76)])] == [False, True]
    assert [one.met for one in judge_levels([_level_row(sent_mb=0.79)])] == [True, False]
    assert judge_levels([_level_row(nbytes=2**19)]) == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "give --network 1gbit and several --hosts"),
        (["--network", "1gbit", "--hosts", "1"], "give --network 1gbit and several --hosts"),
        (["--network", "1gbit", "--backend"], "--backend measures one ring"),
        (
            ["--network", "1gbit", "--ops", "all_gather", "barrier"],
            "reduce_scatter, all_gather, all_reduce are compared",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    argv: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.collectives", "--ranks-per-host", "2", *argv])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert said in capsys.readouterr().err


def test_what_links_have_sent_is_read_without_the_loopback(tmp_path: Path) -> None:
    file = tmp_path / "dev"
    counts = " ".join(str(number) for number in range(1, 17))
    file.write_text(f"Inter-| Receive\n face |bytes\n    lo: {counts}\n  eth0: {counts}\neth1:{counts}\n")
    assert sent_bytes(file) == 9 + 9


@pytest.mark.full
@pytest.mark.needs_root
def test_two_levels_send_between_hosts_what_one_rank_of_each_would(tmp_path: Path) -> None:
    file = tmp_path / "levels.json"
    options = ["--network", "500mbit", "--ranks-per-host", "2", "--ops", "all_reduce", "--sizes", str(2**20)]
    command = [sys.executable, "-m", "bench.collectives", *options, "--busy", "--iterations", "5", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    (row,) = [LevelRow(**each) for each in found["rows"]]
    assert (found["hosts"], found["ranks_per_host"]) == (2, 2)
    assert row.to_hosts == pytest.approx(1.0, abs=0.05)
    assert row.flat_sent_mb == pytest.approx(1.5 * row.hosts_sent_mb, rel=0.05)
