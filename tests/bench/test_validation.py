"""Predictions held to measurement: what is known before a cell runs, what is made of it, and how it is judged."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.emulation.accelerator import Accelerator, gradient_bytes
from bench.models.catalog import workload
from bench.sweep.failures import Failure
from bench.sweep.journal import key
from bench.sweep.runner import name_of
from bench.sweep.table import read
from bench.train.cores import Busy, busy_share, of_stat, stolen_share
from bench.train.launcher import narrowed
from bench.train.origin import Origin
from bench.train.settings import Settings
from bench.validation import facts, known, probe
from bench.validation.__main__ import main
from bench.validation.facts import Facts, Unknown, predict
from bench.validation.judge import Cell, order, summary
from bench.validation.report import draw, markdown
from bench.validation.schedules import KNOWN, Subject, freed_bytes, simulate
from bench.validation.seal import Seal, SealError, commitment, write
from bench.validation.seal import read as unsealed
from osdp.search import DoesNotFit
from overlap.plan.simulation.network import Fitted, Link, Network
from overlap.plan.simulation.profile import Profile, to_text
from overlap.plan.simulation.workload import Layer, Workload
from tests.harness import ROOT

OLD_TABLE, TABLE = (ROOT / "configs" / "sweeps" / name for name in ("prediction.toml", "sealed.toml"))
MB = 2**20
LAYERS = tuple(Layer(str(number), 0.01, 0.02, (MB,)) for number in range(10))
CELL = Settings("dear:threshold_mb=2", "mlp", 32, 500, 2, "1gbit", emulate_compute="mlp@even:560")


def cell(predicted: float, measured: float = 1.0, busy: float | None = 0.5, **settings: Any) -> Cell:
    return Cell(replace(CELL, **settings), predicted, measured, busy)


# - The tables


def test_the_table_has_what_it_should_spread_over() -> None:
    cells = read(TABLE).runs
    slept = [one for one in cells if one.emulate_compute]
    methods = [one.method.partition(":")[0] for one in cells]
    assert len(cells) - methods.count("horovod") >= 40  # which is not built everywhere
    assert len(cells) - len(slept) >= 8
    assert {one.workers for one in slept} == {2, 3, 4, 8}
    assert {one.network for one in slept} == {"100mbit", "1gbit", "2gbit"}
    assert {one.model for one in slept} == {"mlp", "wide_mlp", "narrow_mlp", "resnet50", "vgg16", "bert_base"}
    assert set(methods) == set(KNOWN)
    assert sum(method == "osdp" for method in methods) == 2
    assert all(":" not in one.method for one in cells if one.method.startswith("dear"))


def test_no_cell_was_measured_before() -> None:
    def what(cell: Settings) -> str:
        return key({**cell.to_dict(), "method": cell.method.partition(":")[0], "warmup": 0})

    assert not {what(one) for one in read(TABLE).runs} & {what(one) for one in read(OLD_TABLE).runs}


@pytest.mark.parametrize("table", [OLD_TABLE, TABLE])
def test_neither_computation_nor_wire_of_a_cell_is_next_to_nothing(table: Path) -> None:
    for one in read(table).runs:
        if one.emulate_compute is None:
            continue
        with torch.device("meta"):
            skeleton = workload(one.model).build()
        compute = Accelerator.named(one.emulate_compute, one.batch_size).profile(skeleton).seconds
        nbytes = sum(map(sum, gradient_bytes(skeleton).values()))
        bits_per_second = 0.95 * float(narrowed(one.network, 1).removesuffix("bit"))
        wire = 2 * (one.workers - 1) / one.workers * nbytes * 8 / bits_per_second
        assert 0.3 < compute / wire < 3, one


SPECS = {one.method for table in (OLD_TABLE, TABLE) for one in read(table).runs}


@pytest.mark.parametrize("spec", sorted(SPECS))
def test_every_method_of_the_tables_can_be_simulated(spec: str) -> None:
    subject = Subject(Workload(LAYERS), SLOW, units=[[number] for number in range(10)], freed=6 * 10**8)
    compute, wire = 0.3, 10 * MB * 1e-8
    most = compute + (1.5 if "fsdp" in spec else 1) * wire + (1e-3 if spec == "horovod" else 0)
    assert max(compute, wire) * (1 - 1e-9) <= simulate(spec, subject).step <= most * (1 + 1e-9)


SLOW = Network(2, Link(0.0, 1e-8))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("co2", "does not know co2; it knows dear, oss"),
        ("ddp:view=True", "the simulation of ddp does not know view; it knows bucket_mb"),
        ("osdp", "osdp finds its limit while it runs: give it memory_limit_gb"),
        ("bytescheduler:credit_mb=2", "give both, or neither"),
    ],
)
def test_what_the_simulation_does_not_know_is_said(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(spec, Subject(Workload(LAYERS), SLOW))


def test_what_comes_without_options_is_planned() -> None:
    work, network = Workload(LAYERS), Network(4, Link(1e-3, 1e-8))
    for name, options in (("dear", ("threshold_mb=1", "threshold_mb=8")), ("oss", ("threshold_mb=2",))):
        told = [simulate(f"{name}:{option}", Subject(work, network)).step for option in options]
        assert simulate(name, Subject(work, network)).step <= min(told) * (1 + 1e-9)


def test_what_waits_for_every_collective_hides_nothing() -> None:
    units = [[0, 1, 2], [3, 4, 5], [9, 8, 7, 6]]
    network = Fitted(2, 0.5, 3e-8, 1e-8)
    wire = 3 * (3 * 0.5) + 10 * MB * (2 * 1e-8 + 3e-8)
    assert simulate("fsdp2", Subject(Workload(LAYERS), network, units)).step == pytest.approx(0.3 + wire)
    kept = wire - 3 * 0.5 - 10 * MB * 1e-8
    found = simulate("fsdp2:reshard=False", Subject(Workload(LAYERS), network, units))
    assert found.step == pytest.approx(0.3 + kept)


def test_under_a_limit_as_much_stays_whole_as_fits() -> None:
    subject = Subject(Workload(LAYERS), Network(2, Link(0.0, 1e-7)))
    options = {"memory_limit_gb": 1.0}
    free = freed_bytes(subject, options, 10**9)
    assert 10**9 - 10 * MB <= free < 10**9 - 4 * MB  # all stayed whole: ten MB, but for the room that there is anyway
    steps = [
        simulate(f"osdp:memory_limit_gb={(free + more * MB) / 0.99 / 2**30}", replace(subject, freed=free)).step
        for more in (0.1, 2, 20)
    ]
    assert steps[0] > steps[1] > steps[2]
    assert steps[0] <= simulate("fsdp", subject).step
    with pytest.raises(DoesNotFit):
        simulate("osdp:memory_limit_gb=0.5", replace(subject, freed=free))


def test_buckets_of_ddp_are_those_of_the_cell() -> None:
    network = Network(2, Link(1.0, 0.0))  # starts alone: an all-reduce takes two seconds
    assert simulate("ddp", Subject(Workload(LAYERS), network)).step == pytest.approx(0.12 + 2 * 2)
    assert simulate("ddp:bucket_mb=5", Subject(Workload(LAYERS), network)).step == pytest.approx(0.1 + 5 * 0.02 + 2 * 2)


# - What is known


def test_nothing_that_is_known_is_of_the_cells_own_method_on_its_network() -> None:
    wide = replace(CELL, workers=8, dilate=2.0)
    assert known.alone(wide).method == "none"
    assert known.alone(wide).network == "local"
    assert (known.alone(wide).workers, known.alone(wide).dilate) == (8, 2.0)
    assert known.probe_of(wide) == ("ours", 8, "500000000bit")
    assert known.probe_of(replace(CELL, method="ddp")) == ("gloo", 2, "1000000000bit")
    assert known.kind_of(replace(CELL, method="horovod:cycle_ms=1")) == "horovod"
    for method in KNOWN:
        runs = known.needed(replace(wide, method=method))
        assert {run.network for run in runs} == {"local"}
        assert {run.workers for run in runs[1:] if not run.method.startswith("osdp")} == {1}
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


def _probe(**operations: float) -> dict[str, Any]:
    """Of two hosts: seconds of a byte, by operation; a third of them are processor seconds, and so is half of a start."""
    sizes = (2**12, 2**16, 2**20, 2**24)
    samples = {name: [[n, 1e-4 + byte * n] for n in sizes] for name, byte in operations.items()}
    processor = {name: [[n, 5e-5 + byte / 3 * n] for n in sizes] for name, byte in operations.items()}
    unknown = dict.fromkeys(operations)
    return {"workers": 2, "samples": samples, "processor": processor, "cores_busy": unknown, "processes_busy": unknown}


def test_a_probed_network_takes_what_its_operations_took() -> None:
    ours = known.Probed.of(_probe(half=1e-8, whole=3e-8))
    for cost, byte in ((ours.reduce_scatter(MB), 1e-8), (ours.all_gather(MB), 1e-8), (ours.all_reduce(MB), 3e-8)):
        assert cost.seconds == pytest.approx(1e-4 + byte * MB, rel=0.01)
        assert cost.processor == pytest.approx(5e-5 + byte * MB / 3, rel=0.01)
    gloo = known.Probed.of(_probe(gather=1e-8, scatter=4e-8))
    assert gloo.reduce_scatter(MB).transfer == pytest.approx(4 * gloo.all_gather(MB).transfer, rel=0.01)


def test_what_the_kernel_does_for_no_process_is_of_all_ranks() -> None:
    plain = _probe(half=1e-8)
    found = [
        known.Probed.of({**plain, "cores_busy": {"half": busy}, "processes_busy": {"half": 0.2}})
        for busy in (0.1, 0.2, 0.5)
    ]
    costs = [one.all_gather(MB).processor for one in (known.Probed.of(plain), *found)]
    assert costs[0] == costs[1] == costs[2]
    assert costs[3] == pytest.approx(2.5 * costs[0])


def test_what_takes_no_processor_seconds_is_no_line() -> None:
    silent = {**_probe(half=1e-8), "processor": {"half": [[4096, 0.0], [MB, 0.0]]}}
    assert known.Probed.of(silent).reduce_scatter(MB).processor == 0.0


def _ran(seconds: float) -> dict[str, Any]:
    return {"step_seconds": [seconds / 2, seconds, 10 * seconds], "parameter_bytes": 1000}


def test_the_thread_is_what_methods_add_on_one_rank() -> None:
    small = {"none": _ran(1.0), known.ONE_BUCKET: _ran(1.9), known.EACH_LAYER: _ran(2.8)}
    model = {"none": _ran(3.0), known.ONE_BUCKET: _ran(5.1), "ddp": _ran(4.0)}
    thread = known.our_thread(small, model, (10, 8), tensors=10)
    assert thread.per_bucket == pytest.approx(0.1)
    assert thread.per_tensor == pytest.approx((0.9 - 0.1) / 8)
    assert thread.copy == pytest.approx((2.1 - 0.1 - 10 * 0.1) / 1000)
    assert known.adding_thread(model, "ddp") == known.Thread(0.0, 0.0, 1e-3)
    assert known.per_gradient({"none": _ran(1.0), "horovod": _ran(1.8)}, "horovod", 8) == pytest.approx(0.1)
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


def test_without_what_has_to_be_known_nothing_is_predicted() -> None:
    with pytest.raises(Unknown, match="none-mlp@even-560-bs32-2x-local has not been measured"):
        predict(CELL, Facts(2))


def _facts(cells: list[Settings], seconds: float = 0.56, cores: int = 2) -> Facts:
    """What has to be known of cells, as if it had been measured: a method costs the thread nothing, and networks little."""
    found = Facts(cores)
    phases = {"forward": seconds / 3, "backward": 2 * seconds / 3, "step": 0.0}
    told = {"step_seconds": [seconds], "phase_seconds": phases, "parameter_bytes": 10**8, "cores_busy": 0.25}
    told |= {"versions": {}, "origin": Origin("abc", "2", {}).to_dict(), "limit_share": 1e9 / 2**40}
    for cell in cells:
        for run in (*known.needed(cell), known.profiled(cell)):
            found.runs[key(run.to_dict())] = {"settings": asdict(run), **told}
        operations = {"ours": ("half", "whole"), "gloo": ("whole", "gather", "scatter"), "horovod": ("whole",)}
        kind = known.kind_of(cell)
        found.probes[known.named(*known.probe_of(cell))] = _probe(**dict.fromkeys(operations[kind], 1e-9))
        if cell.emulate_compute is None:
            layers = replace(cell, emulate_compute="mlp@even:560")
            text = to_text(Profile("mlp", "cpu", cell.batch_size, "measured", found.profile(layers)))
            found.profiles[name_of(known.profiled(cell))] = text
    return found


ALL = [replace(CELL, method=method) for method in KNOWN if method != "osdp"]
ALL += [replace(CELL, method="osdp:memory_limit_gb=1")]


@pytest.mark.parametrize("cell", ALL, ids=lambda cell: cell.method)
def test_a_prediction_is_computed_from_what_is_known(cell: Settings) -> None:
    # Ten thousand of 1e-9 s hide behind half a second, but where collectives are awaited.
    found = predict(cell, _facts([cell]))
    assert 0.56 < found < 0.56 + (0.4 if cell.method in ("fsdp2", "wfbp", "horovod", "bytescheduler") else 0.2)


def test_the_units_of_fsdp2_are_those_that_it_makes() -> None:
    cell = replace(CELL, method="fsdp2", model="resnet50", emulate_compute="resnet50@even:100")
    layers = Facts(2).profile(cell)
    for each in (cell, replace(cell, emulate_compute=None)):
        units = facts._units(each, layers)
        assert sorted(number for unit in units for number in unit) == list(range(len(layers)))
        assert all(sum(layers[number].nbytes for number in unit) <= 25 * MB for unit in units)
        assert 5 <= len(units) <= 30


def test_real_computation_is_slower_on_cores_that_move_the_bytes() -> None:
    real = replace(CELL, emulate_compute=None, workers=2)
    steps = {cores: predict(real, _facts([real], cores=cores)) for cores in (2, 8)}
    assert steps[2] > 1.01 * steps[8]
    slept = replace(CELL, workers=2)
    assert len({predict(slept, _facts([slept], cores=cores)) for cores in (2, 8)}) == 1


def test_a_probe_tells_processor_seconds() -> None:
    before = probe._processor_seconds()
    sum(number * number for number in range(10**6))
    assert probe._processor_seconds() > before


# - The seal


def _sealed(cells: list[Settings], table: str = "") -> Seal:
    known_facts = _facts(cells)
    return Seal(table, Origin("abc", "2", {}), known_facts, tuple((cell, predict(cell, known_facts)) for cell in cells))


def _committed(folder: Path, at: str = "2020-01-02T03:04:05Z") -> None:
    """All files of a folder in a commit of a repository there."""
    who = {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b"}
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "seal"]):
        subprocess.run(
            ["git", "-C", str(folder), *words],
            check=True,
            env={**who, "GIT_COMMITTER_DATE": at, "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        )


def test_a_sealed_file_has_all_that_its_predictions_follow_from(tmp_path: Path) -> None:
    cells = [CELL, replace(CELL, method="fsdp2"), replace(CELL, method="ddp", emulate_compute=None)]
    sealed, path = _sealed(cells, "title = 1"), tmp_path / "sealed.json"
    write(sealed, path)
    again = unsealed(path)
    assert again == sealed
    assert again.sha256 == sealed.sha256 == json.loads(path.read_text())["sha256"]
    assert again.recomputed() == []
    assert [again.of(cell) for cell in cells] == [value for _, value in sealed.predictions]
    assert again.of(replace(CELL, workers=4)) == "its prediction is not among those that were sealed"
    other = replace(again, predictions=((CELL, 0.5), *again.predictions[1:]))
    assert other.recomputed() == [CELL]
    assert other.sha256 != again.sha256


@pytest.mark.parametrize("what", ["seconds", "step_seconds", "title = 1"])
def test_a_sealed_file_that_was_changed_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "sealed.json"
    write(_sealed([CELL], "title = 1"), path)
    whole = json.loads(path.read_text())
    if what == "seconds":
        whole["sealed"]["predictions"][0]["seconds"] *= 1.0001
    elif what == "step_seconds":
        whole["sealed"]["runs"][0]["step_seconds"] = [1.0]
    else:
        whole["sealed"]["table"] = "title = 2"
    path.write_text(json.dumps(whole))
    with pytest.raises(SealError, match=r"says that its SHA-256 is .*: it was changed; seal anew"):
        unsealed(path)


def test_without_a_sealed_file_in_an_older_commit_nothing_may_run(tmp_path: Path) -> None:
    path = tmp_path / "sealed.json"
    with pytest.raises(SealError, match="seal predictions first, with --seal"):
        unsealed(path)
    path.write_text("{}")
    with pytest.raises(SealError, match="holds no sealed predictions: KeyError"):
        unsealed(path)
    write(_sealed([CELL]), path)
    with pytest.raises(SealError, match="not a git repository"):
        commitment(path)
    (tmp_path / "other").write_text("")
    path.rename(tmp_path.parent / "sealed.json")
    _committed(tmp_path)
    (tmp_path.parent / "sealed.json").rename(path)
    with pytest.raises(SealError, match="is in no commit before HEAD"):
        commitment(path)
    _committed(tmp_path)
    told = commitment(path)
    assert (len(told.commit), str(told)[10:]) == (40, " of 2020-01-02 03:04 UTC")
    with pytest.raises(SealError, match="which is yet to come: set the clock"):
        commitment(path, now=datetime(2019, 12, 31, tzinfo=timezone.utc))
    write(_sealed([replace(CELL, workers=4)]), path)
    with pytest.raises(SealError, match=r"is not what commit [0-9a-f]{10} has"):
        commitment(path)


TWO_CELLS = (
    'title = "Two cells"\n[[runs]]\nmethods = ["dear:threshold_mb=2", "ddp"]\nmodels = ["mlp"]\nnetworks = ["1gbit"]\n'
    'emulate_compute = "mlp@even:560"\nwarmup = 10\niterations = 5\nbatches = 10\n'
)


def test_sealing_measures_what_predictions_need_and_none_of_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.toml").write_text(TWO_CELLS)
    cells = list(read(tmp_path / "table.toml").runs)
    ready, ran, begun = _facts(cells), [], "2020-01-02T03:04:06+00:00"
    others = 0.6  # of the cores

    def look(*, allowed: bool) -> float:
        if others > 0 and not allowed:
            raise Busy("other processes keep 60%")
        return others

    def run(runs: list[Settings], journal: Any, *rest: Any) -> None:
        for one in runs:
            rest[-1]()
            ran.append(one)
            journal.add({**ready.runs[key(one.to_dict())], "origin": journal_origin.to_dict(), "begun": begun})

    def probed(kind: str, hosts: int, rate: str) -> Mapping[str, Any]:
        if kind == "gloo":
            raise probe.FAILS[0]("no gloo here")
        return ready.probes[known.named(kind, hosts, rate)]

    journal_origin = Origin("abc", "2", {})
    monkeypatch.setattr("bench.validation.measure.look", look)
    monkeypatch.setattr("bench.validation.measure.run_all", run)
    monkeypatch.setattr("bench.validation.measure.probe.measure", probed)
    monkeypatch.setattr("bench.validation.__main__.today", lambda: journal_origin)
    monkeypatch.setattr("bench.validation.__main__.end_in_order", lambda: None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    sealed = tmp_path / "sealed.json"
    argv = [
        "bench.validation",
        str(tmp_path / "table.toml"),
        "--sealed",
        str(sealed),
        "--output",
        str(tmp_path / "logs"),
    ]
    monkeypatch.setattr("sys.argv", [*argv, "--seal"])
    assert main() == 2
    assert "other processes keep 60%" in capsys.readouterr().err
    assert not ran
    monkeypatch.setattr("sys.argv", [*argv, "--seal", "--busy"])
    assert main() == 1  # ddp has no prediction
    others = 0.0
    assert not set(ran) & set(cells)
    assert sorted(ran, key=str) == sorted(dict.fromkeys(run for cell in cells for run in known.needed(cell)), key=str)
    found = unsealed(sealed)
    assert found.of(cells[0]) == predict(cells[0], ready)
    assert found.of(cells[1]) == "the probe gloo-2x1000000000bit failed: no gloo here"
    assert found.table == TWO_CELLS
    assert f"1 of 2 cells are predicted; {sealed} has SHA-256 {found.sha256}" in capsys.readouterr().err
    # What is sealed and in no commit is not run.
    ran.clear()
    monkeypatch.setattr("sys.argv", argv)
    assert main() == 2
    assert not ran
    assert "not a git repository" in capsys.readouterr().err
    # But where that is asked for, and the report says so.
    ready.runs[key(cells[0].to_dict())] = {**next(iter(ready.runs.values())), "settings": asdict(cells[0])}
    monkeypatch.setattr("sys.argv", [*argv, "--uncommitted", "--report", str(tmp_path / "report.md")])
    assert main() == 1
    assert ran == [cells[0]]
    assert f"SHA-256 {found.sha256}, in no commit, before any cell ran." in (tmp_path / "report.md").read_text()
    # Once it is, what is predicted runs, and is held to what was sealed.
    _committed(tmp_path)
    (tmp_path / "logs" / found.sha256[:12] / "results.jsonl").unlink()
    ran.clear()
    monkeypatch.setattr("sys.argv", [*argv, "--report", str(tmp_path / "report.md")])
    assert main() == 1
    assert ran == [cells[0]]
    text = (tmp_path / "report.md").read_text()
    assert f"SHA-256 {found.sha256}, in commit " in text
    assert "before any cell ran." in text
    assert "* ddp, mlp@even:560, 2 hosts, 1gbit: no prediction: the probe gloo-2x1000000000bit failed" in text
    assert "| dear:threshold_mb=2 |" in text
    # What ran before is no measurement of it.
    results = tmp_path / "logs" / found.sha256[:12] / "results.jsonl"
    results.write_text(results.read_text().replace(begun, "2020-01-02T03:04:05+00:00"))
    assert main() == 1
    text = (tmp_path / "report.md").read_text()
    assert "it ran before its prediction was sealed, in commit" in text
    assert "| dear:threshold_mb=2 |" not in text
    # Other code, or another table, makes other predictions.
    monkeypatch.setattr("bench.validation.__main__.today", lambda: Origin("def", "2", {}))
    monkeypatch.setattr("sys.argv", argv)
    assert main() == 2
    assert "predictions were sealed with abc, torch 2, and this is def, torch 2" in capsys.readouterr().err
    (tmp_path / "table.toml").write_text(TWO_CELLS.replace("Two", "2"))
    assert main() == 2
    assert "is not the table that" in capsys.readouterr().err


def test_what_was_sealed_is_computed_and_reported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.toml").write_text(TWO_CELLS)
    cells = list(read(tmp_path / "table.toml").runs)
    sealed = _sealed(cells, TWO_CELLS)
    write(sealed, tmp_path / "sealed.json")
    ran = {**next(iter(sealed.facts.runs.values())), "settings": asdict(cells[0])}
    (tmp_path / sealed.sha256[:12]).mkdir()
    (tmp_path / sealed.sha256[:12] / "results.jsonl").write_text(json.dumps(ran) + "\n")
    report, data = tmp_path / "report.md", tmp_path / "report.json"
    argv = ["bench.validation", str(tmp_path / "table.toml"), "--sealed", str(tmp_path / "sealed.json")]
    argv += ["--output", str(tmp_path), "--report-only"]
    monkeypatch.setattr("sys.argv", [*argv, "--only", "workers=2", "--report", str(report), "--json", str(data)])
    assert main() == 1  # one of them has not been run
    text = report.read_text()
    assert "| dear:threshold_mb=2 | mlp@even:560 | 2 | 1gbit | 564 | 560 | +0.8% | 25% |" in text
    assert "* ddp, mlp@even:560, 2 hosts, 1gbit: it has not been run" in text
    assert "in no commit (git log: fatal: not a git repository" in text
    assert "Computed again from what was sealed with them, of 2 predictions all are equal." in text
    assert report.with_suffix(".png").exists()
    kept = json.loads(data.read_text())
    assert [one["measured"] for one in kept["cells"]] == [0.56]
    assert [one["settings"]["method"] for one in kept["failures"]] == ["ddp"]
    assert kept["seal"]["sha256"] == sealed.sha256
    write(replace(sealed, predictions=((cells[0], 0.5), *sealed.predictions[1:])), tmp_path / "sealed.json")
    monkeypatch.setattr("sys.argv", argv)
    main()
    told = capsys.readouterr()
    assert "of 2 predictions 1 differ, and were sealed with other code" in told.out
    assert "another prediction follows for dear:threshold_mb=2" in told.err
    monkeypatch.setattr("sys.argv", [*argv, "--only", "workers=3"])
    assert main() == 2
    assert "no run of the sweep has workers=3" in capsys.readouterr().err


def test_cores_are_busy_with_everything_but_waiting() -> None:
    before, after = (
        of_stat(f"cpu  {busy} 0 10 {idle} 5 1 2 3 0 0\ncpu0 1 1\n") for busy, idle in ((100, 50), (130, 60))
    )
    assert before == (116, 171, 3)
    assert busy_share(before, after) == pytest.approx(0.75)
    assert stolen_share(before, after._replace(stolen=13)) == pytest.approx(0.25)
    for share in (busy_share, stolen_share):
        assert share(before, before) is None
        assert share(None, after) is None


# - Judging


def test_errors_are_of_what_was_measured() -> None:
    assert cell(0.9).error == pytest.approx(-0.1)
    assert [cell(1.0, busy=busy).limited_by_cores for busy in (None, 0.89, 0.95)] == [False, False, True]
    found = summary([cell(0.9), cell(1.04), cell(1.02)])
    assert found is not None
    assert (found.count, found.within, found.fast, found.slow) == (3, 2, 1, 2)
    assert (found.median, found.worst, found.mean) == pytest.approx((0.04, -0.1, -0.04 / 3))
    assert found.met == (False, False)
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
    assert "* All: 3 cells, median error 10.0%, 1 within 5% (33%)" in text
    assert "* Slept computation: 2 cells, median error 6.0%, 1 within 5% (50%), the worst -10.0%; 1 predicted" in text
    assert "worst -10.0%; 1 predicted too fast, 1 too slow, mean error -4.0%." in text
    assert "* Of these, where cores were not the limit: 1 cells, median error 2.0%" in text
    assert "* Real computation: 1 cells, median error 20.0%, 0 within 5% (0%), the worst +20.0%; 0 predicted" in text
    assert "* Goals, for all cells: a median error of at most 3%, **missed**; 90% within 5%, **missed**." in text
    assert "| dear:threshold_mb=2 | mlp@even:560 | 2 | 1gbit | 900 | 1000 | **-10.0%** | 97%: the limit |" in text
    assert "| ddp | mlp@even:560 | 2 | 1gbit, dilated 2 | 1020 | 1000 | +2.0% | 50% |" in text
    assert "| wfbp | mlp, real, batch 32 | 2 | 1gbit | 1200 | 1000 | **+20.0%** | 50% |" in text
    assert "* oss:threshold_mb=2, mlp@even:560, 2 hosts, 1gbit: it ended" in text
    wrong = markdown("", "", [cell(1.0, 1.0), cell(0.9, 1.2, method="ddp")], [], None)
    assert "of 1 pairs of methods that differ by more than 5%, 0 are predicted in the right order" in wrong
    assert "dear:threshold_mb=2 is faster than ddp (mlp@even:560, 2 hosts, 1gbit): measured 1000 and 1200 ms" in wrong
    calm = "* Where others left the machine alone: 1 cells"
    assert calm not in text
    assert "†" not in text
    marked = markdown("", "", [cell(1.0), replace(cell(1.2, method="ddp"), disturbed=True)], [], None)
    assert calm in marked
    assert "| ddp† | mlp@even:560 |" in marked
    assert "† on a machine that others used" in marked
