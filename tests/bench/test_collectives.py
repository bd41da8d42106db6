"""A run is judged by its numbers alone."""

from __future__ import annotations

from typing import Any

import pytest

from bench.collectives.bars import judge
from bench.collectives.rows import Row, row_of, table


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
    ratios = {"to_gloo": 1.0, "to_wire": 1.0, "cpu_to_gloo": 1.0}
    return Row(operation=operation, bytes=nbytes, **{**base, **ratios, **figures})  # type: ignore[arg-type]


def test_every_bar_can_be_missed() -> None:
    for figures in ({"to_wire": 1.09}, {"to_gloo": 1.04}, {"cpu_to_gloo": 1.01}):
        verdicts = judge([_row(**figures)], 2, "mpi")
        assert [verdict.met for verdict in verdicts].count(False) == 1, figures
    assert all(verdict.met for verdict in judge([_row(to_wire=1.08)], 2, "mpi"))
    assert all(verdict.met for verdict in judge([_row(to_wire=1.25)], 4, "mpi"))
    assert not all(verdict.met for verdict in judge([_row(to_wire=1.06)], 2, "tcp"))


def test_small_messages_are_only_compared_with_gloo() -> None:
    verdicts = judge([_row(nbytes=4096, to_wire=9.0, to_gloo=1.4, cpu_to_gloo=3.0)], 2, "mpi")
    assert [verdict.met for verdict in verdicts] == [True]


def test_bars_speak_of_the_rings_only() -> None:
    assert judge([_row("broadcast", to_wire=9.0, to_gloo=9.0)], 2, "mpi") == []


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


def test_quartiles_lie_within_what_was_measured() -> None:
    row = row_of(_measured([0.1, 0.9], [1.0, 1.0]), goodput_bytes=None)
    assert (row.low_ms, row.high_ms) == (pytest.approx(300), pytest.approx(700))
