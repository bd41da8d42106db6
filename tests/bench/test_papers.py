"""Predictions held to published figures: what is read, how it is judged, and that the simulation knows all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.validation.papers.__main__ import DEFAULT
from bench.validation.papers.judge import Compared, Pair, Verdict, by_methods, median_error, pairs, speedups
from bench.validation.papers.published import Cell, Published, Source, read
from bench.validation.papers.report import draw, markdown, rate
from bench.validation.papers.simulation import METHODS, WITHIN, Claimed, paced, predicted
from dear import predict
from overlap.plan.simulation.methods import Prediction
from overlap.plan.simulation.profile import known, load

CELL = Cell("s", "vgg16", "rtx2080ti", 32, "rtx2080ti", 32, "10gbit", 8, 4, 0.3, {"A": 1.0, "B": 1.04, "C": 2.0})
METHODS_OF = {"A": "wfbp", "B": "DDP", "C": "one all-reduce"}
SOURCE = Source("s", "a title", "table 1", ("found",), ("it",), "B", METHODS_OF, (CELL,))


def compared(**steps: float) -> Compared:
    return Compared(CELL, {name: (step, 0.9 * step, 1.2 * step) for name, step in steps.items()}, "B", 0.3, 10**8)


def test_the_simulation_knows_every_model_network_and_method_of_the_table() -> None:
    published = read(DEFAULT)
    assert {source.name for source in published.sources} == {"survey", "MG-WFBP", "ASC-WFBP"}
    for source in published.sources:
        assert set(source.methods.values()) <= METHODS.keys()
        assert source.base in source.methods
        for cell in source.cells:
            assert f"{cell.model}@{cell.profile_device}:{cell.profile_batch}" in known()
            assert cell.network in predict.NETWORKS
            assert cell.workers % cell.per_host == 0
            assert source.base in cell.steps
            assert 0.9 * cell.one_gpu < min(cell.steps.values())  # no job is much faster than one GPU by itself
    for claim in published.claims:
        assert claim.up_to.keys() <= predict.NETWORKS.keys()
        assert {f"{model}@{device}:{batch}" for model, device, batch in claim.profiles} <= set(known())
        assert {name for _, method, others in claim.groups for name in (method, *others)} <= METHODS.keys()
    assert WITHIN in predict.WITHIN


def test_a_rate_becomes_a_step(tmp_path: Path) -> None:
    cell = read(DEFAULT).sources[0].cells[3]
    assert (cell.model, cell.workers, cell.network) == ("resnet50", 32, "10gbit")
    assert cell.steps["BSP"] == pytest.approx(32 * 64 / 4920.82)
    assert cell.one_gpu == pytest.approx(64 / 253.1)
    short = tmp_path / "short.toml"
    short.write_text(DEFAULT.read_text().replace("BSP = [925.02, ", "BSP = [", 1))
    with pytest.raises(ValueError, match=r"resnet50@rtx2080ti:64 on 10gbit: BSP should .* 4 numbers, and has 3"):
        read(short)
    short.write_text("[[sources]]")
    with pytest.raises(ValueError, match="no table of published numbers"):
        read(short)


def test_pairs_are_in_order_alike_or_opposite() -> None:
    found = pairs(CELL, {"A": 1.0, "B": 1.995, "C": 2.0})
    assert [(p.fast, p.slow, p.verdict) for p in found] == [
        ("A", "C", Verdict.IN_ORDER),
        ("B", "C", Verdict.ALIKE),  # A and B are too close to be judged
    ]
    assert found[0].published == pytest.approx(2.0)
    assert [p.verdict for p in pairs(CELL, {"A": 2.0, "B": 2.5, "C": 2.1})] == [Verdict.IN_ORDER, Verdict.OPPOSITE]
    assert Pair(CELL, "A", "C", 2.0, 1 / 1.005).verdict is Verdict.ALIKE
    turned = pairs(replace(CELL, steps={"A": 2.0, "C": 1.0}), {"A": 1.0, "C": 2.0})
    assert list(by_methods([*found, *turned])) == [("A", "C"), ("B", "C")]


def test_speedups_are_over_the_base_and_off_by_a_factor() -> None:
    assert speedups({"A": 2.0, "B": 4.0}, "B") == {"A": 2.0, "B": 1.0}
    assert median_error([compared(A=1.0, B=1.04, C=2.0)]) == pytest.approx(0.0)
    off = compared(A=1.0 / 1.3, B=1.04, C=2.0 * 1.1)
    assert median_error([off]) == pytest.approx((1.3 * 1.1) ** 0.5 - 1)
    assert compared(A=1.0, B=1.2, C=2.0).within == 2  # 1.04 is below 0.9 x 1.2


def test_a_ring_of_two_carries_all_bytes_each_way() -> None:
    assert rate(10**9, 2, 8.0) == pytest.approx(1.0)


def test_a_profile_takes_as_long_as_was_published() -> None:
    profile = load("vgg16", "rtx2080ti", 32)
    slower = paced(profile, 2 * profile.seconds)
    assert slower.seconds == pytest.approx(2 * profile.seconds)
    assert slower.layers[3].backward == pytest.approx(2 * profile.layers[3].backward)
    likely, *_ = predict.guesses(slower, "10gbit", WITHIN)
    assert likely.pace == 1.0


def test_a_job_is_predicted_and_reported(tmp_path: Path) -> None:
    found = predicted(SOURCE, CELL)
    assert found["A"].alone == pytest.approx(CELL.one_gpu)
    assert CELL.one_gpu < found["B"].step < found["C"].step
    assert predicted(SOURCE, CELL, own_pace=True)["A"].alone == pytest.approx(load("vgg16", "rtx2080ti", 32).seconds)
    rows = [Claimed("vgg16", "10gbit", "fused", found["B"], (found["A"], found["C"]))]
    claim = replace(read(DEFAULT).claims[0], up_to={"10gbit": 1.83})
    published = Published((SOURCE,), (claim,))
    one = compared(A=2.0, B=1.04, C=1.0)
    picture = draw(published, [one], rows, tmp_path / "papers.png")
    text = markdown("By nobody.", published, [one], [one], rows, picture)
    assert "of 2 pairs, 0 are predicted in the published order, 0 alike, 2 opposite" in text
    assert "| s | A, C | 0 | 0 | 1 | vgg16, 8 × 10gbit: A faster, 2.00 → 0.50 |" in text
    assert "| s | vgg16 | 8 | 10gbit | 1700 | 700 | 0.8 | 2.0 |" in text
    assert "![predicted and published speedups](papers.png)" in text
    assert "up to 1.83 published" in text
    assert text.count("* it\n") == 1
    assert isinstance(rows[0].method, Prediction)
    assert picture.stat().st_size > 10_000
