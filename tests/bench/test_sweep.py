"""Sweeps: tables, resume, retries, the lower bound, bars and reports."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.methods import registry
from bench.methods.spec import _SEARCHED, family_of
from bench.methods.strategies import PACKAGES
from bench.sweep import table
from bench.sweep.bars import Bar, judge
from bench.sweep.bars import parse as parse_bars
from bench.sweep.failures import Failure, Failures
from bench.sweep.journal import Journal
from bench.sweep.plots import draw
from bench.sweep.report import write
from bench.sweep.runner import name_of, run_all
from bench.sweep.search import expand
from bench.sweep.summary import group
from bench.train.cores import was_busy
from bench.train.origin import Origin
from bench.train.settings import Settings, parse, to_argv
from tests.harness import ROOT

NOW = Origin("abc", "2", {})


def result_of(settings: Settings, seconds: float, **more: Any) -> dict[str, Any]:
    rate = settings.batch_size * settings.workers / seconds
    return {
        "settings": asdict(settings),
        "unit": "img",
        "step_seconds": [0.9 * seconds, seconds, 1.1 * seconds],
        "total": rate,
        "plus_minus": rate / 20,
        "state_bytes": 0,
        "peak_bytes": 2**30,
        "parameter_bytes": 10**8,
        "goodput": None,
        "versions": {"commit": "abc", "torch": "2"},
        "origin": NOW.to_dict(),
        **more,
    }


def test_braces_give_every_combination() -> None:
    assert expand("ddp:bucket_mb={1,4}") == ["ddp:bucket_mb=1", "ddp:bucket_mb=4"]
    assert len(expand("horovod:fusion_mb={1,4,16},cycle_ms={1,5}")) == 6
    assert expand("dear") == ["dear"]
    assert expand("ddp:bucket_mb={..,1,4,..}") == ["ddp:bucket_mb=1", "ddp:bucket_mb=4"]


def test_a_table_is_every_combination_of_its_lists() -> None:
    data = {
        "defaults": {"warmup": 2},
        "runs": [
            {
                "methods": ["dear", "ddp:bucket_mb={1,4}"],
                "models": ["mlp", "resnet50"],
                "workers": [2, 4],
                "networks": ["1gbit"],
                "emulate_compute": "{model}@even:9",
            }
        ],
    }
    runs = table.parse(data).runs
    assert len(runs) == 12
    assert {run.emulate_compute for run in runs} == {"mlp@even:9", "resnet50@even:9"}
    assert {(run.model, run.batch_size, run.warmup) for run in runs} == {("mlp", 32, 2), ("resnet50", 64, 2)}
    assert [run.method for run in runs[:3]] == ["dear", "ddp:bucket_mb=1", "ddp:bucket_mb=4"]


def test_defaults_are_for_tables_without() -> None:
    defaults = {"networks": ["1gbit"], "workers": [4], "models": ["mlp"], "batch_sizes": [16], "methods": ["ddp"]}
    tables = [
        {},
        {"models": ["resnet50"], "workers": [8], "batch_sizes": [2]},
        {"networks": ["local"], "workers": [2, 3]},
    ]
    runs = table.parse({"defaults": defaults, "runs": tables}).runs
    assert [(run.method, run.model, run.network, run.workers, run.batch_size) for run in runs] == [
        ("ddp", "mlp", "1gbit", 4, 16),
        ("ddp", "resnet50", "1gbit", 8, 2),
        ("ddp", "mlp", "local", 2, 16),
        ("ddp", "mlp", "local", 3, 16),
    ]
    (plain,) = table.parse({"runs": [{"methods": ["wfbp"]}]}).runs
    assert (plain.method, plain.model, plain.workers, plain.batch_size) == ("wfbp", "resnet50", 2, 64)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"at least one \[\[runs\]\]"),
        ({"runs": [{"modles": ["mlp"]}]}, r"\[\[runs\]\] does not know modles; .* is models meant\?"),
        ({"runs": [{"model": "mlp"}]}, r"\[\[runs\]\] does not know model; .* is models meant\?"),
        (
            {"defaults": {"network": "1gbit"}, "runs": [{}]},
            r"\[defaults\] does not know network; .* is networks meant\?",
        ),
        ({"runs": [{"models": "mlp"}]}, "models of a sweep should be a list and is 'mlp'"),
        ({"runs": [{"launchers": "mpi"}]}, "launchers of a sweep should be a list and is 'mpi'"),
        ({"runs": [{"launchers": ["mpi"], "launcher": "mpi"}]}, "launcher and launchers are both given"),
        ({"runs": [{"methods": ["ddp:view={True,..}"]}]}, "goes on with numbers above 0, and view of .* is True"),
        ({"runs": [{"methods": ["ddp:bucket_mb={..,0}"]}]}, "goes on with numbers above 0, and bucket_mb of .* is 0"),
        ({"runs": [{"models": ["lenet"]}]}, "is 'lenet'"),
        ({"runs": [{"methods": ["deer"]}]}, "'deer' should be one of"),
        ({"runs": [{"workers": [0]}]}, "workers should be at least 1 and is 0"),
        ({"runs": [{}], "bars": [{"method": "dear", "at_most": 1, "where": {"hosts": 2}}]}, "does not know hosts"),
        ({"runs": [{}], "bars": [{"method": "dear", "at_most": 1, "where": {"iterations": 3}}]}, "not know iterations"),
        ({"runs": [{}], "bars": [{"method": "deer", "at_most": 1}]}, "method of .* one of dear, .* and is 'deer'"),
        (
            {"runs": [{}], "bars": [{"method": "dear", "of": "no", "at_most": 1}]},
            "of of .* one of bound, .* is 'no'",
        ),
        ({"runs": [{}], "bars": [{"method": "none", "at_most": 1}]}, "method of .* one of dear, .* is 'none'"),
        (
            {"runs": [{}], "bars": [{"method": "dear", "of": "none", "at_most": 1}]},
            "is 'none', and the sweep runs dear",
        ),
        ({"runs": [{}], "bars": [{"method": "dear", "of": "ddp", "at_most": 1}]}, "is 'ddp', and the sweep runs dear"),
        ({"runs": [{}], "bars": [{"method": "dear:threshold_mb=4", "at_most": 1}]}, "write 'dear'"),
        (
            {"runs": [{}], "bars": [{"method": "dear:exclude_parts=allgather", "at_most": 1}]},
            "leaves communication out",
        ),
        ({"runs": [{}], "bars": [{"method": "dear"}]}, "needs at_most; it has method"),
        ({"runs": [{}], "bars": [{"method": "dear", "at_most": "1.2"}]}, "at_most .* is '1.2'"),
    ],
)
def test_a_wrong_table_is_refused_with_the_reason(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table.parse(data)


def test_a_part_of_a_sweep_is_selected_by_its_settings() -> None:
    sweep = table.parse({"runs": [{"methods": ["dear", "ddp"], "models": ["mlp"], "workers": [2, 4, 8]}]})
    part = table.select(sweep, ["workers=2", "workers=8", "method=ddp"])
    assert [(run.method, run.workers) for run in part.runs] == [("ddp", 2), ("ddp", 8)]
    assert {(run.method, run.workers) for run in part.left_out} == {("dear", n) for n in (2, 4, 8)} | {("ddp", 4)}
    assert table.select(sweep, []) == sweep
    with pytest.raises(ValueError, match="not by 'hosts=2'"):
        table.select(sweep, ["hosts=2"])
    with pytest.raises(ValueError, match="no run of the sweep has workers=3"):
        table.select(sweep, ["workers=3"])


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.toml")), ids=lambda path: path.stem)
def test_the_sweeps_that_come_along_are_valid(path: Path) -> None:
    sweep = table.read(path)
    assert sweep.title
    assert sweep.runs


def test_what_makes_another_method_is_no_setting_that_is_searched() -> None:
    specs = ["dear:threshold_mb=1", "dear:threshold_mb=4", "dear:eager=True,threshold_mb=4", "dear:eager=False"]
    assert [family_of(spec) for spec in specs] == ["dear", "dear", "dear:eager=True", "dear"]
    assert family_of("dear:gather_dtype=bf16,threshold_mb=4,eager=True") == "dear:eager=True,gather_dtype=bf16"
    assert [family_of(spec) for spec in ("fsdp2:reshard=True", "bytescheduler:credit_mb=2")] == [
        "fsdp2",
        "bytescheduler",
    ]


@pytest.mark.parametrize(
    "option",
    [
        "exclude_parts=reducescatter allgather",
        "strategy=wfbp",
        "backward_passes_per_step=8",
        "policy=rb",
        "sync_start=False",
        "an_option_of_tomorrow=1",
    ],
)
def test_an_option_that_nobody_searches_makes_a_method_of_its_own(option: str) -> None:
    assert family_of(f"dear:threshold_mb=4,{option}") == f"dear:{option}"
    assert family_of("dear:policy=rsag,strategy=dear,exclude_parts=,gather_dtype=None") == "dear"


def test_a_run_that_leaves_communication_out_is_not_the_fastest_of_its_method() -> None:
    base = {"model": "mlp", "workers": 2, "network": "1gbit"}
    silent = "dear:exclude_parts=reducescatter allgather"
    steps = {"none": 0.8, "dear": 1.1, silent: 0.8}
    (one,) = group(result_of(Settings(method=name, **base), seconds) for name, seconds in steps.items())  # type: ignore[arg-type]
    assert one.best["dear"].method == "dear"
    assert [verdict.met for verdict in judge([one], [Bar("dear", "bound", 1.05, {})])] == [False]


def test_every_searched_option_is_one_of_some_method() -> None:
    takers: set[str] = set()
    for name in registry.METHODS:
        if name in PACKAGES:
            module = importlib.import_module(PACKAGES[name])
            takers.update(inspect.signature(module.DistributedOptimizer).parameters)
        else:
            takers.update(type(registry.method(name)).defaults)
    assert takers >= _SEARCHED


def test_settings_survive_the_command_line() -> None:
    settings = Settings(
        method="ddp:bucket_mb=4", model="mlp", size=500, workers=2, emulate_compute="mlp@even:9", dilate=5
    )
    assert parse(to_argv(settings))[0] == settings


def test_a_sweep_goes_on_where_it_stopped_and_never_caches_failures(tmp_path: Path) -> None:
    emulated: dict[str, Any] = {"emulate_compute": "mlp@even:9", "dilate": 10}  # as a table has it: no decimal point
    runs = [Settings(method=name, model="mlp", workers=2, **emulated) for name in ("dear", "ddp", "horovod", "none")]
    tried: list[str] = []

    def attempt(run: Settings, log: Path) -> tuple[dict[str, Any] | None, str, bool]:
        tried.append(run.method)
        if run.method == "horovod":
            return None, "not installed", False
        if run.method == "ddp" and tried.count("ddp") < 4:
            return None, "connection reset", True
        return result_of(parse(to_argv(run))[0], 1.0), "", False  # what the run's own process makes of it

    past = tmp_path / "results.jsonl"

    def failed_of_a_sweep() -> list[Failure]:
        journal, failures = Journal(past, NOW), Failures(tmp_path / "failures.jsonl")
        run_all(runs, journal, failures, tmp_path, 2, attempt)
        return failures.of(runs, journal)

    failed = failed_of_a_sweep()
    assert tried == ["dear", "ddp", "ddp", "horovod", "none"]
    assert [(one.settings.method, one.reason, one.tries) for one in failed] == [
        ("ddp", "connection reset", 2),
        ("horovod", "not installed", 1),
    ]
    with past.open("a") as file:
        file.write('{"settings": {"meth')  # killed in the middle of a line
    tried[:] = ["ddp", "ddp"]
    assert [one.settings.method for one in failed_of_a_sweep()] == ["horovod"]
    assert tried[2:] == ["ddp", "ddp", "horovod"]
    assert len(past.read_text().splitlines()) == 3


def test_a_run_whose_cores_were_given_to_other_guests_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = {"dear": [0.3, 0.01, 0.0], "ddp": [0.2, 0.1, 0.15], "none": [None]}
    runs = [Settings(method=name, model="mlp", workers=2) for name in shares]
    left = {name: list(found) for name, found in shares.items()}

    def attempt(run: Settings, log: Path) -> tuple[dict[str, Any] | None, str, bool]:
        return result_of(run, 1.0, cores_stolen=left[run.method].pop(0)), "", False

    journal = Journal(tmp_path / "results.jsonl", NOW)
    run_all(runs, journal, Failures(tmp_path / "failures.jsonl"), tmp_path, 3, attempt)
    kept = [journal.get(run) or {} for run in runs]
    assert [one["cores_stolen"] for one in kept] == [0.01, 0.1, None]
    assert [was_busy(one) for one in kept] == [False, True, False]
    assert left == {"dear": [0.0], "ddp": [], "none": []}
    told = capsys.readouterr().out
    assert told.count("; once more") == 3
    assert "30% taken by other guests of the host; once more" in told


def some_results() -> list[dict[str, Any]]:
    base = {"model": "mlp", "batch_size": 32, "size": 500, "network": "1gbit", "emulate_compute": "mlp@even:800"}
    steps = {"none": 0.8, "dear": 1.1, "ddp:bucket_mb=1": 1.5, "ddp:bucket_mb=25": 1.2}
    results = []
    for workers in (2, 4):
        for method, seconds in steps.items():
            settings = Settings(method=method, workers=workers, **base)  # type: ignore[arg-type]
            results.append(result_of(settings, seconds, goodput=1e8))
    return results


def test_the_bound_is_the_larger_of_compute_and_wire() -> None:
    two, four = group(some_results())
    assert (two.compute, two.wire, two.bound) == (0.8, pytest.approx(1.0), pytest.approx(1.0))
    assert four.bound == pytest.approx(1.5)
    assert two.best["ddp"].method == "ddp:bucket_mb=25"
    assert "none" not in two.best
    alone = group(some_results()[1:4])
    assert alone[0].bound is None


def test_the_best_setting_is_one_of_those_that_ran_most_often() -> None:
    runs = [
        ("ddp:bucket_mb=1", 0, 0.9),
        ("ddp:bucket_mb=2", 0, 1.0),
        ("ddp:bucket_mb=2", 1, 1.2),
        ("ddp", 0, 1.1),
        ("ddp", 1, 1.2),
    ]
    about = {"model": "mlp", "workers": 2, "network": "1gbit"}
    results = [result_of(Settings(method=name, repeat=repeat, **about), seconds) for name, repeat, seconds in runs]  # type: ignore[arg-type]
    (one,) = group([*results, result_of(Settings(method="dear", **about), 1.1)])  # type: ignore[arg-type]
    assert one.best["ddp"].method == "ddp:bucket_mb=2"  # 0.9 may have been luck
    assert [row.method for row in one.candidates("ddp")] == ["ddp:bucket_mb=2", "ddp"]
    (verdict,) = judge([one], [Bar("dear", "ddp", 1.05, {})])
    assert verdict.met is False  # of the same run: 1.1 beside 1.0
    assert "x ddp:bucket_mb=2" in verdict.text


def test_quartiles_of_two_steps_lie_between_them() -> None:
    (one,) = group([result_of(Settings(), 1.0, step_seconds=[0.1, 0.9])])
    assert (one.rows[0].low, one.rows[0].high) == (pytest.approx(0.3), pytest.approx(0.7))


def test_bars_compare_with_the_bound_and_with_the_best_setting_of_a_method() -> None:
    bars = [
        Bar("dear", "bound", 1.08, {"workers": 2}),
        Bar("dear", "ddp", 0.95, {"workers": 4}),
        Bar("dear", "none", 1.4, {"workers": 4}),
        Bar("dear", "horovod", 0.7, {}),
    ]
    verdicts = judge(group(some_results()), bars)
    assert [verdict.met for verdict in verdicts] == [False, True, True, None]
    assert "dear 1.38 (n = 1) x none, bar 1.40" in verdicts[2].text
    assert "dear 1.10 (n = 1) x L, bar 1.08" in verdicts[0].text
    assert "dear 0.92 (n = 1) x ddp:bucket_mb=25, bar 0.95" in verdicts[1].text


def test_a_bar_may_speak_of_a_method_as_it_comes() -> None:
    (one,) = group(
        [
            result_of(Settings(method="none"), 0.8, goodput=1e8),
            result_of(Settings(method="dear"), 1.0, goodput=1e8),
            result_of(Settings(method="dear:threshold_mb=1"), 0.9, goodput=1e8),
            result_of(Settings(method="dear:threshold_mb=25"), 1.2, goodput=1e8),
            result_of(Settings(method="ddp:bucket_mb=1"), 1.1, goodput=1e8),
        ]
    )
    bars = [Bar("dear", "dear", 1.03, {}, as_it_comes=True), Bar("dear", "ddp", 1.0, {}, as_it_comes=True)]
    found = judge([one], bars)
    assert [verdict.met for verdict in found] == [False, True]
    assert "dear as it comes 1.11 (n = 1) x dear:threshold_mb=1, bar 1.03" in found[0].text
    assert "dear as it comes 0.91 (n = 1) x ddp:bucket_mb=1" in found[1].text
    (without,) = group([result_of(Settings(method=name), 1.0) for name in ("none", "dear:threshold_mb=1")])
    (verdict,) = judge([without], [Bar("dear", "bound", 1.1, {}, as_it_comes=True)])
    assert verdict.met is None
    assert "no result of it as it comes" in verdict.text
    with pytest.raises(ValueError, match="about a method without options"):
        parse_bars([{"method": "dear:eager=True", "at_most": 1, "as_it_comes": True}], ["dear:eager=True"])


def test_a_bar_may_compare_means() -> None:
    waits = result_of(Settings(method="co2:outer=localsgd"), 1.0, step_seconds=[0.6, 0.6, 0.6, 9.0])
    found = judge(
        group([result_of(Settings(method="none"), 0.6), waits]), [Bar("co2:outer=localsgd", "none", 1.03, {})]
    )
    assert [verdict.met for verdict in found] == [True]
    bars = parse_bars(
        [{"method": "co2:outer=localsgd", "of": "none", "at_most": 1.03, "mean": True}], ["none", "co2:outer=localsgd"]
    )
    (verdict,) = judge(group([result_of(Settings(method="none"), 0.6), waits]), bars)
    assert verdict.met is False
    assert "co2:outer=localsgd 4.50 (n = 1) x none" in verdict.text
    with pytest.raises(ValueError, match="compares two methods"):
        parse_bars([{"method": "dear", "at_most": 1, "mean": True}], ["dear"])


def test_every_bar_gets_a_verdict() -> None:
    nowhere = judge(group(some_results()), [Bar("dear", "ddp", 2.0, {"workers": "2"})])
    assert [(one.met, one.passes, one.word) for one in nowhere] == [(None, False, "not judged")]
    assert nowhere[0].text == "dear at most 2.00 x ddp where workers=2: no group of the sweep has runs of both"


def test_a_bar_is_not_judged_while_one_of_its_runs_is_missing() -> None:
    slow, missing = some_results()[:3], Settings(**some_results()[3]["settings"])
    bars = [Bar("dear", "ddp", 0.95, {}), Bar("dear", "bound", 1.2, {})]
    verdicts = judge(group(slow), bars, missing=[missing])
    assert [(one.met, one.passes) for one in verdicts] == [(None, False), (True, True)]
    assert verdicts[0].text.endswith("dear at most 0.95 x ddp: no result of ddp:bucket_mb=25")
    runs = [Settings(**one["settings"]) for one in some_results()[:4]]
    assert [one.met for one in judge([], bars, missing=runs)] == [None, None]


def test_bars_whose_runs_were_not_selected_are_excused() -> None:
    two, four = some_results()[:4], [Settings(**one["settings"]) for one in some_results()[4:]]
    bars = [Bar("dear", "ddp", 0.95, {}), Bar("dear", "ddp", 0.95, {"workers": 4})]
    verdicts = judge(group(two), bars, left_out=four)
    assert [(one.met, one.passes) for one in verdicts] == [(True, True), (None, True)]
    assert verdicts[1].text == "dear at most 0.95 x ddp where workers=4: left out by --only"
    left_out = [Settings(**one["settings"]) for one in two[3:]]
    (some,) = judge(group(two[:3]), bars[:1], left_out=left_out)
    assert some.met
    assert some.text.endswith("bar 0.95, without ddp:bucket_mb=25, left out by --only")


def test_runs_under_a_chosen_launcher_have_a_group_and_bars_of_their_own() -> None:
    chosen = [{**one, "settings": {**one["settings"], "launcher": "torchrun"}} for one in some_results()[:4]]
    groups = group([*some_results()[:4], *chosen])
    assert [one.title.endswith("1gbit, under torchrun") for one in groups] == [False, True]
    bars = [Bar("dear", "bound", 1.2, {"workers": 2}), Bar("dear", "bound", 1.0, {"launcher": "torchrun"})]
    assert [(one.met, "torchrun" in one.text) for one in judge(groups, bars)] == [(True, False), (False, True)]


def test_reports_name_everything_and_pictures_are_drawn(tmp_path: Path) -> None:
    results = some_results()
    groups = group(results)
    pictures = draw(groups, tmp_path)
    assert [picture.name for picture in pictures] == ["throughput.png", "distance.png", "scaling.png"]
    assert all(picture.stat().st_size > 10_000 for picture in pictures)
    failures = [Failure(Settings(method="horovod"), "not installed", 1)]
    write(tmp_path, "A title", results, groups, judge(groups, [Bar("dear", "bound", 1.08, {})]), failures, pictures)
    text = (tmp_path / "reports.md").read_text()
    for part in ("# A title", "**missed**", "wire/compute 1.25", "ddp:bucket_mb=1 |", "not installed (tried 1 times)"):
        assert part in text
    assert (tmp_path / "reports.json").exists()


def test_no_distance_from_l_is_drawn_where_nobody_sends_every_gradient(tmp_path: Path) -> None:
    base = {"model": "mlp", "workers": 2, "network": "1gbit"}
    steps = {"none": 0.3, "co2": 0.31, "co2:outer=acco": 0.32}
    runs = [result_of(Settings(method=name, **base), seconds, goodput=1e8) for name, seconds in steps.items()]  # type: ignore[arg-type]
    assert [picture.name for picture in draw(group(runs), tmp_path)] == ["throughput.png"]


def test_a_misspelt_setting_or_method_is_told_with_the_one_that_is_meant() -> None:
    sweep = table.parse({"runs": [{"methods": ["dear"], "models": ["mlp"], "workers": [2]}]})
    with pytest.raises(ValueError, match=r"and not by 'wokers=2'; is workers meant\?$"):
        table.select(sweep, ["wokers=2"])
    with pytest.raises(ValueError, match=r"and is 'daer'; is dear meant\?$"):
        registry.method("daer")


def test_a_table_says_how_often_each_run_is_repeated() -> None:
    tables = [
        {"methods": ["dear", "ddp"], "models": ["mlp"], "workers": [2, 4]},
        {"methods": ["none"], "models": ["mlp"], "repeats": 1},
    ]
    data = {"defaults": {"repeats": 2}, "runs": tables}
    told = [(run.method, run.workers, run.repeat) for run in table.parse(data).runs]
    in_turn = [[("dear", n, 0), ("ddp", n, 0), ("ddp", n, 1), ("dear", n, 1)] for n in (2, 4)]
    assert told == [*in_turn[0], *in_turn[1], ("none", 2, 0)]
    assert [run.repeat for run in table.parse(data, 3).runs if run.method == "none"] == [0, 1, 2]
    for wrong in (0, 2.5, True):
        with pytest.raises(
            ValueError, match=f"repeats of a sweep should be a whole number of at least 1 and is {wrong}"
        ):
            table.parse({"runs": [{"repeats": wrong}]})
    with pytest.raises(ValueError, match=r"does not know repeat; .* is repeats meant\?"):
        table.parse({"runs": [{"repeat": 2}]})


def test_runs_that_differ_in_their_number_are_one_row_and_are_compared_in_pairs() -> None:
    """The machine becomes slower from run to run; the one is a tenth faster all the time."""
    base: dict[str, Any] = {"model": "mlp", "workers": 2, "network": "1gbit"}
    results = [
        result_of(Settings(method=name, repeat=number, **base), factor * (1 + number), cores_busy=0.1 * number)
        for number in range(6)
        for name, factor in (("none", 0.5), ("dear", 0.9), ("ddp", 1.0))
    ]
    results[4]["busy_before"] = 0.5
    (one,) = group(results)
    none, dear, ddp = one.rows
    assert (dear.n, len(dear.runs), dear.busy, ddp.busy) == (18, 6, True, False)
    assert dear.median == pytest.approx(0.9 * 3.5)
    assert dear.cores_busy == pytest.approx(0.5)
    assert one.compute == pytest.approx(none.median)
    bound = one.to_bound(dear)
    assert bound is not None
    assert (bound.value, bound.n) == (pytest.approx(1.8), 6)
    (once,) = group([result for result in results if result["settings"]["method"] != "none" or result is results[0]])
    bound = once.to_bound(once.rows[1])
    assert bound is not None
    assert (bound.value, bound.n, bound.interval) == (pytest.approx(0.9 * 3.5 / 0.5), 1, None)
    met, missed = judge([one], [Bar("dear", "ddp", 0.91, {}), Bar("dear", "bound", 1.7, {})])
    assert (met.met, missed.met) == (True, False)
    assert "dear 0.90 (0.90 – 0.90, n = 6) x ddp, bar 0.91" in met.text


def test_a_result_of_before_runs_had_numbers_is_the_first(tmp_path: Path) -> None:
    old = result_of(Settings(), 1.0)
    del old["settings"]["repeat"]
    journal = Journal(tmp_path / "results.jsonl", NOW)
    journal.add(old)
    assert journal.get(Settings()) == old
    assert journal.get(Settings(repeat=1)) is None
    assert group([old])[0].rows[0].runs == {0: 1.0}


# - Searches that go on, and launchers


def _searched(table_of: dict[str, Any], seconds: dict[str, float]) -> tuple[table.Sweep, list[str]]:
    """The sweep, and the methods beyond its table where runs take `seconds`; the last one may not be among these."""
    sweep = table.parse({"runs": [{"models": ["mlp"], **table_of}]})
    return sweep, [run.method for run in sweep.beyond(lambda run: seconds.get(run.method))]


@pytest.mark.parametrize(
    ("best", "more"),
    [
        (4, []),
        (1, ["0.5"]),  # which has no result yet
        (0.5, ["0.5", "0.25"]),
        (0.25, ["0.5", "0.25", "0.125"]),
        (25, ["50"]),
        (100, ["50", "100", "200"]),
    ],
)
def test_a_search_goes_on_until_its_best_lies_between_two_others(best: float, more: list[str]) -> None:
    known = {"0.125", "0.25", "0.5", "1", "4", "25", "50", "100", "200"} - set(more[-1:] if best in (1, 25) else [])
    seconds = {f"ddp:bucket_mb={size}": 1 + abs(float(size) - best) / best for size in known}
    sweep, found = _searched({"methods": ["dear", "ddp:bucket_mb={..,1,4,25,..}"]}, seconds)
    assert len(sweep.runs) == 4
    assert found == [f"ddp:bucket_mb={size}" for size in more]


def test_a_search_goes_only_where_it_is_told_and_not_for_ever() -> None:
    falling = {f"ddp:bucket_mb={2.0**power:g}": 2.0**power for power in range(-20, 20)}
    assert len(_searched({"methods": ["ddp:bucket_mb={..,1,4}"]}, falling)[1]) == 8
    assert _searched({"methods": ["ddp:bucket_mb={1,4,..}"]}, falling)[1] == []
    assert _searched({"methods": ["ddp:bucket_mb={..,1,4}"]}, {"ddp:bucket_mb=1": 1.0})[1] == []  # 4 is missing


def test_a_search_knows_what_it_found_where_only_its_best_was_run_again() -> None:
    sweep = table.parse({"runs": [{"models": ["mlp"], "methods": ["ddp:bucket_mb={..,1,4}"], "repeats": 2}]})
    ran = {("ddp:bucket_mb=0.5", 0): 1.2, ("ddp:bucket_mb=1", 0): 1.0, ("ddp:bucket_mb=1", 1): 1.1}
    ran[("ddp:bucket_mb=4", 0)] = 1.5
    found = sweep.beyond(lambda run: ran.get((run.method, run.repeat)))
    assert [(run.method, run.repeat) for run in found] == [("ddp:bucket_mb=0.5", 0), ("ddp:bucket_mb=0.5", 1)]


def test_each_combination_of_other_options_is_searched_by_itself() -> None:
    seconds = {f"ddp:bucket_mb={size},view={view}": 1.0 for size in ("1", "2", "4") for view in (True, False)}
    seconds |= {"ddp:bucket_mb=1,view=True": 0.5, "ddp:bucket_mb=2,view=False": 0.5}
    sweep, found = _searched({"methods": ["ddp:bucket_mb={..,1,2,4},view={True,False}"], "workers": [2, 4]}, seconds)
    assert found == ["ddp:bucket_mb=0.5,view=True"] * 2
    assert [run.workers for run in sweep.beyond(lambda run: seconds.get(run.method))] == [2, 4]
    part = table.select(sweep, ["workers=2"])
    assert len(part.beyond(lambda run: seconds.get(run.method))) == 1
    assert table.select(sweep, ["method=ddp:bucket_mb=1,view=True"]).searches == ()


def test_each_method_runs_under_the_launchers_that_can_start_it() -> None:
    methods = ["dear", "dear:transport=mpi", "ddp", "horovod:operations={mpi,gloo}"]
    runs = table.parse({"runs": [{"methods": methods, "launchers": ["torchrun", "mpi"]}]}).runs
    everywhere = ["dear", "ddp"]
    under = {name: {run.method for run in runs if run.launcher == name} for name in ("torchrun", "mpi")}
    assert under["torchrun"] == {*everywhere, "horovod:operations=gloo"}
    assert under["mpi"] == {*everywhere, "dear:transport=mpi", "horovod:operations=mpi"}
    # A table's own word counts before that of the defaults, and one launcher is a wish that its run answers.
    of_defaults = {"defaults": {"launchers": ["torchrun", "mpi"]}}
    assert [run.launcher for run in table.parse({**of_defaults, "runs": [{"launcher": "mpi"}]}).runs] == ["mpi"]
    assert [run.launcher for run in table.parse({**of_defaults, "runs": [{}]}).runs] == ["torchrun", "mpi"]
    (only,) = table.parse({"runs": [{"methods": ["horovod"], "launchers": ["torchrun"]}]}).runs
    assert only.launcher == "torchrun"
    assert [run.launcher for run in table.parse({"runs": [{}]}).runs] == [None]


def test_tables_tell_who_started_each_run_and_what_moved_its_bytes(tmp_path: Path) -> None:
    settings = {"model": "mlp", "workers": 2, "network": "1gbit"}
    told = [("dear", "mpi", "tcp"), ("dear:transport=mpi", "mpi", "mpi"), ("ddp", "torchrun", "gloo")]
    results = [
        result_of(Settings(method=name, **settings), 1.0, started_by=by, bytes_over=over)  # type: ignore[arg-type]
        for name, by, over in told
    ]
    results.append(result_of(Settings(method="wfbp", **settings), 1.0))  # type: ignore[arg-type]  # an older one
    write(tmp_path, "A title", results, group(results), [], [], [])
    text = (tmp_path / "reports.md").read_text()
    assert "| method | started by | bytes over | network | img/sec |" in text
    for name, by, over in [*told, ("wfbp", "", "")]:
        assert f"| {name} | {by} | {over} | 1gbit | " in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1


def test_runs_under_two_launchers_have_logs_of_their_own() -> None:
    names = {name_of(Settings(launcher=launcher)) for launcher in (None, "mpi", "torchrun")}
    assert len(names) == 3
