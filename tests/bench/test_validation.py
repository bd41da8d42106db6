"""Predictions held to measurement: what is known before a cell runs, what is made of it, and how it is judged."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.emulation.accelerator import Accelerator, gradient_bytes
from bench.models.catalog import workload
from bench.sweep.failures import Failure
from bench.sweep.table import read
from bench.train.cores import busy_share, of_stat
from bench.train.launcher import narrowed
from bench.train.origin import Origin
from bench.train.settings import Settings
from bench.validation import known
from bench.validation.__main__ import main
from bench.validation.judge import Cell, order, summary
from bench.validation.measure import Unknown, Workshop
from bench.validation.report import draw, markdown
from bench.validation.schedules import KNOWN, simulate
from overlap.plan.simulation.network import Link, Network
from overlap.plan.simulation.workload import Layer, Workload
from tests.harness import ROOT

TABLE = ROOT / "configs" / "sweeps" / "prediction.toml"
MB = 2**20
LAYERS = tuple(Layer(str(number), 0.01, 0.02, (MB,)) for number in range(10))
CELL = Settings("dear:threshold_mb=2", "mlp", 32, 500, 2, "1gbit", emulate_compute="mlp@even:560")


def cell(predicted: float, measured: float = 1.0, busy: float | None = 0.5, **settings: Any) -> Cell:
    return Cell(replace(CELL, **settings), predicted, measured, busy)


# - The table


def test_the_table_has_what_it_should_spread_over() -> None:
    cells = read(TABLE).runs
    slept = [one for one in cells if one.emulate_compute]
    assert len(slept) >= 60
    assert len(cells) - len(slept) >= 6
    assert {one.workers for one in slept} == {2, 4, 8}
    assert {one.network for one in slept} == {"100mbit", "1gbit", "2gbit"}
    assert {one.model for one in slept} == {"mlp", "narrow_mlp", "resnet50", "vgg16", "bert_base"}
    assert {one.method.partition(":")[0] for one in slept} == set(KNOWN)


def test_neither_computation_nor_wire_of_a_cell_is_next_to_nothing() -> None:
    for one in read(TABLE).runs:
        if one.emulate_compute is None:
            continue
        with torch.device("meta"):
            skeleton = workload(one.model).build()
        compute = Accelerator.named(one.emulate_compute, one.batch_size).profile(skeleton).seconds
        nbytes = sum(map(sum, gradient_bytes(skeleton).values()))
        bits_per_second = 0.95 * float(narrowed(one.network, 1).removesuffix("bit"))
        wire = 2 * (one.workers - 1) / one.workers * nbytes * 8 / bits_per_second
        assert 0.3 < compute / wire < 3, one


@pytest.mark.parametrize("spec", sorted({one.method for one in read(TABLE).runs}))
def test_every_method_of_the_table_can_be_simulated(spec: str) -> None:
    compute, wire = 0.3, 10 * MB * 1e-8
    found = simulate(spec, Workload(LAYERS), Network(2, Link(0.0, 1e-8))).step
    assert max(compute, wire) * (1 - 1e-9) <= found <= (compute + wire) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("horovod", "does not know horovod; it knows dear, oss"),
        ("ddp:view=True", "the simulation of ddp does not know view; it knows bucket_mb"),
        ("dear", "dear is planned while it runs: give it threshold_mb"),
        ("bytescheduler:credit_mb=2", "planned while it runs: give it partition_mb"),
    ],
)
def test_what_the_simulation_does_not_know_is_said(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(spec, Workload(LAYERS), Network(2, Link(0.0, 1e-8)))


def test_buckets_of_ddp_are_those_of_the_cell() -> None:
    network = Network(2, Link(1.0, 0.0))  # starts alone: an all-reduce takes two seconds
    assert simulate("ddp", Workload(LAYERS), network).step == pytest.approx(0.12 + 2 * 2)
    assert simulate("ddp:bucket_mb=5", Workload(LAYERS), network).step == pytest.approx(0.1 + 5 * 0.02 + 2 * 2)


# - What is known


def test_nothing_that_is_known_is_of_the_cells_own_method_on_its_network() -> None:
    wide = replace(CELL, workers=8, dilate=2.0)
    assert known.alone(wide).method == "none"
    assert known.alone(wide).network == "local"
    assert (known.alone(wide).workers, known.alone(wide).dilate) == (8, 2.0)
    assert {run.workers for run in known.references("mlp").values()} == {1}
    assert known.probe_of(wide) == ("ours", 8, "500000000bit")
    assert known.probe_of(replace(CELL, method="ddp")) == ("gloo", 2, "1000000000bit")
    assert known.profiled(replace(CELL, emulate_compute=None)).workers == 1


@pytest.mark.parametrize(("operation", "halves"), [("half", 1), ("whole", 2)])
def test_a_probe_tells_the_link_that_would_take_as_long(operation: str, halves: int) -> None:
    link = Link(1e-4, 1e-8)
    ring = Network(4, link)
    samples = [(n, halves * ring.half(n).seconds) for n in (2**12, 2**16, 2**20, 2**26)]
    found = known.link_of({"workers": 4, "samples": {operation: samples}}, operation, 2**26)
    assert found.beta == pytest.approx(link.beta, rel=1e-3)
    assert found.alpha == pytest.approx(link.alpha, rel=0.01)


def test_starts_that_pass_behind_others_do_not_make_bytes_cheap() -> None:
    samples = [(n, max(1e-4, n * 1e-8)) for n in (2**12, 2**15, 2**18, 2**22)]
    found = known.link_of({"workers": 2, "samples": {"half": samples}}, "half")
    assert found.beta == pytest.approx(2e-8)
    assert 0 < found.alpha < 1e-4


def test_operations_that_caches_do_not_hold_count_for_layers_that_are_as_large() -> None:
    mib = 2**20
    samples = [(n, n * (1e-8 if n <= 16 * mib else 1.1e-8)) for n in (mib, 4 * mib, 16 * mib, 64 * mib, 256 * mib)]
    probe = {"workers": 2, "samples": {"half": samples}}
    assert known.link_of(probe, "half", 3 * mib).beta == pytest.approx(2e-8)
    assert known.link_of(probe, "half", 100 * mib).beta == pytest.approx(2.2e-8)


def test_cores_that_move_bytes_do_not_compute() -> None:
    probe = {"workers": 2, "cores_busy": {"half": 0.3, "whole": None}}
    assert known.contention(probe, "half", 2) == pytest.approx(0.3)
    assert known.contention(probe, "whole", 2) == 0.0


def _ran(seconds: float) -> dict[str, Any]:
    return {"step_seconds": [seconds / 2, seconds, 10 * seconds], "parameter_bytes": 1000}


def test_the_thread_is_what_methods_add_on_one_rank() -> None:
    small = {"none": _ran(1.0), known.ONE_BUCKET: _ran(1.9), known.EACH_LAYER: _ran(2.8)}
    model = {"none": _ran(3.0), known.ONE_BUCKET: _ran(5.1), "ddp": _ran(4.0)}
    thread = known.our_thread(small, model, (10, 8), tensors=10)
    assert thread.per_bucket == pytest.approx(0.1)
    assert thread.per_tensor == pytest.approx((0.9 - 0.1) / 8)
    assert thread.copy == pytest.approx((2.1 - 0.1 - 10 * 0.1) / 1000)
    assert known.ddp_thread(model) == known.Thread(0.0, 0.0, 1e-3)
    nothing = known.our_thread({name: _ran(1.0) for name in small}, {name: _ran(1.0) for name in model}, (10, 8), 10)
    assert nothing == known.Thread(0.0, 0.0, 0.0)


def test_layers_take_what_the_method_none_took() -> None:
    result = {"phase_seconds": {"forward": 0.11, "backward": 0.24}}
    uneven = (*LAYERS[:-1], replace(LAYERS[-1], tensors=(11 * MB,)))  # 20 MB in all
    for slept in (True, False):
        found = known.layers_of(uneven, result, 1e-9, slept=slept)
        copied = 20 * MB * 1e-9
        assert sum(layer.forward for layer in found) == pytest.approx(0.11)
        assert sum(layer.backward for layer in found) == pytest.approx(0.24 + copied)
    falling_asleep = known.layers_of(uneven, result, 0.0, slept=True)
    assert falling_asleep[0].forward == pytest.approx(0.011)
    # What waking does not explain is in proportion to bytes.
    assert falling_asleep[0].backward == pytest.approx(0.021 + 0.03 / 20)
    assert falling_asleep[-1].backward == pytest.approx(0.021 + 11 * 0.03 / 20)
    assert known.layers_of(uneven, result, 0.0, slept=False)[0].backward == pytest.approx(0.024)


def test_without_what_has_to_be_known_nothing_is_predicted(tmp_path: Path) -> None:
    with pytest.raises(Unknown, match=r"none-mlp@even-560-bs32-2x-local has no result"):
        Workshop(tmp_path, Origin("abc", "2", {}), run=False).predict(CELL)


def _keep(folder: Path, cell: Settings, seconds: float) -> None:
    """What has to be known of `cell`, as if it had been measured: nothing costs the thread anything, or the network."""
    runs = [known.alone(cell), *known.references(cell.model).values(), *known.references(known.SMALL).values()]
    phases = {"forward": seconds / 3, "backward": 2 * seconds / 3, "step": 0.0}
    told = {"step_seconds": [seconds], "phase_seconds": phases, "parameter_bytes": 10**8, "cores_busy": 0.25}
    told |= {"versions": {}, "origin": Origin("abc", "2", {}).to_dict()}
    lines = [json.dumps({"settings": asdict(run), **told}) + "\n" for run in (*runs, cell)]
    (folder / "results.jsonl").write_text("".join(lines))
    (folder / "probes").mkdir()
    samples = [[4096, 1e-9], [2**24, 4096e-9]]
    (folder / "probes" / "ours-2x1000000000bit.json").write_text(
        json.dumps({"workers": 2, "samples": {"half": samples}, "cores_busy": {"half": 0.1}})
    )


def test_what_was_measured_is_reported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _keep(tmp_path, CELL, 0.56)
    table, report, data = (tmp_path / name for name in ("table.toml", "reports.md", "reports.json"))
    table.write_text(
        'title = "Two cells"\n[[runs]]\nmethods = ["dear:threshold_mb=2", "ddp"]\nmodels = ["mlp"]\nnetworks = ["1gbit"]\n'
        'emulate_compute = "mlp@even:560"\nwarmup = 10\niterations = 5\nbatches = 10\n'
    )
    argv = ["bench.validation", str(table), "--output", str(tmp_path), "--report-only", "--only", "workers=2"]
    monkeypatch.setattr("sys.argv", [*argv, "--report", str(report), "--json", str(data)])
    assert main() == 1  # one of them has not been measured
    assert "| dear:threshold_mb=2 | mlp@even:560 | 2 | 1gbit | 560 | 560 | +0.0% | 25% |" in report.read_text()
    assert "* ddp, mlp@even:560, 2 hosts, 1gbit: no prediction: gloo-2x1000000000bit.json" in report.read_text()
    assert report.with_suffix(".png").exists()
    kept = json.loads(data.read_text())
    assert [one["measured"] for one in kept["cells"]] == [0.56]
    assert kept["cells"][0]["predicted"] == pytest.approx(0.56, rel=1e-3)
    assert [one["settings"]["method"] for one in kept["failures"]] == ["ddp"]
    monkeypatch.setattr("sys.argv", [*argv[:-1], "workers=3"])
    assert main() == 2
    assert "no run of the sweep has workers=3" in capsys.readouterr().err


def test_cores_are_busy_with_everything_but_waiting() -> None:
    before, after = (
        of_stat(f"cpu  {busy} 0 10 {idle} 5 1 2 3 0 0\ncpu0 1 1\n") for busy, idle in ((100, 50), (130, 60))
    )
    assert before == (116, 171)
    assert busy_share(before, after) == pytest.approx(0.75)
    assert busy_share(before, before) is None
    assert busy_share(None, after) is None


# - Judging


def test_errors_are_of_what_was_measured() -> None:
    assert cell(0.9).error == pytest.approx(-0.1)
    assert [cell(1.0, busy=busy).limited_by_cores for busy in (None, 0.89, 0.95)] == [False, False, True]
    found = summary([cell(0.9), cell(1.04), cell(1.02)])
    assert found is not None
    assert (found.count, found.within) == (3, 2)
    assert (found.median, found.worst) == pytest.approx((0.04, -0.1))
    assert summary([]) is None


def test_only_methods_of_one_group_that_differ_enough_have_an_order() -> None:
    cells = [
        cell(1.0, 1.0, method="a"),
        cell(0.9, 1.04, method="b"),  # too near to a
        cell(0.8, 1.2, method="c", warmup=8),  # wrong against both
        cell(9.0, 9.0, method="d", workers=4),  # of another group
    ]
    found = order(cells)
    assert found.pairs == 2
    assert [(fast.settings.method, slow.settings.method) for fast, slow in found.wrong] == [("a", "c"), ("b", "c")]


def test_the_report_leaves_nothing_out(tmp_path: Path) -> None:
    cells = [
        cell(0.9, busy=0.97),
        cell(1.02, method="ddp", dilate=2.0),
        cell(1.2, method="wfbp", emulate_compute=None),
    ]
    failed = [Failure(replace(CELL, method="oss:threshold_mb=2"), "it ended", 2)]
    picture = draw(cells, tmp_path / "reports.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = markdown("Title", "About.", cells, failed, picture)
    assert text.startswith("# Title\n\nAbout.\n")
    assert "![predicted over measured](reports.png)" in text
    assert "* Slept computation: 2 cells, median error 6.0%, 1 within 5% (50%), the worst -10.0%." in text
    assert "* Of these, where cores were not the limit: 1 cells, median error 2.0%" in text
    assert "* Real computation: 1 cells, median error 20.0%, 0 within 5% (0%), the worst +20.0%." in text
    assert "| dear:threshold_mb=2 | mlp@even:560 | 2 | 1gbit | 900 | 1000 | **-10.0%** | 97%: the limit |" in text
    assert "| ddp | mlp@even:560 | 2 | 1gbit, dilated 2 | 1020 | 1000 | +2.0% | 50% |" in text
    assert "| wfbp | mlp, real, batch 32 | 2 | 1gbit | 1200 | 1000 | **+20.0%** | 50% |" in text
    assert "* oss:threshold_mb=2, mlp@even:560, 2 hosts, 1gbit: it ended" in text
    wrong = markdown("", "", [cell(1.0, 1.0), cell(0.9, 1.2, method="ddp")], [], None)
    assert "of 1 pairs of methods that differ by more than 5%, 0 are predicted in the right order" in wrong
    assert "dear:threshold_mb=2 is faster than ddp (mlp@even:560, 2 hosts, 1gbit): measured 1000 and 1200 ms" in wrong
