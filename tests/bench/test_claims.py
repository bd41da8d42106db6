"""Numbers in the pages are those of the results; a digit that differs, or a number without a source, is found."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.claims.__main__ import pages
from bench.claims.headline import compared, draw
from bench.claims.pages import MEASURED, problems, unsourced, written
from bench.claims.views import RESULTS, VIEWS, render
from bench.collectives.levels import LevelRow
from bench.sweep.summary import group
from bench.train.settings import Settings
from bench.validation.judge import Cell
from tests.bench.test_sweep import result_of
from tests.harness import ROOT

SENTENCE = "dear takes <!-- results: ratio a -->0.81<!-- end --> of it.\n"
TABLE = "<!-- results: table a -->\n| a | b |\n| 0.5 | 2 |\n<!-- end -->\n"


def _view(source: str) -> str:
    return "0.81" if source.startswith("ratio") else "| a | b |\n| 0.5 | 2 |"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_pages_say_what_the_results_say(page: Path) -> None:
    text = page.read_text()
    found = list(problems(text))
    name = str(page.relative_to(ROOT))
    if name in MEASURED:
        found += [(line, f"{number!r} names no source") for line, number in unsourced(text, MEASURED[name])]
    assert found == [], "python -m bench.claims --write corrects numbers that have a source"


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_any_changed_digit_of_a_page_is_found(page: str) -> None:
    text = (ROOT / page).read_text()
    given = {found[1]: found[2] for found in re.finditer(r"<!-- results: (.*?) -->(.*?)<!-- end -->", text, re.DOTALL)}
    assert len(given) > 5

    def view(source: str) -> str:
        return given[source].strip("\n")

    assert list(problems(text, view)) == []
    for source, said in given.items():
        places = [place for place, letter in enumerate(said) if letter.isdigit()] or [0]  # or a number in words
        for place in {places[0], places[-1]}:
            letter = str((int(said[place]) + 1) % 10) if said[place].isdigit() else "x"
            other = f"{said[:place]}{letter}{said[place + 1 :]}"
            changed = text.replace(f"<!-- results: {source} -->{said}", f"<!-- results: {source} -->{other}", 1)
            assert len(list(problems(changed, view))) == 1


def test_a_page_is_written_once_and_for_all() -> None:
    stale = SENTENCE.replace("0.81", "0.9") + "\n" + TABLE.replace("| 0.5 | 2 |", "| 0.4 | 2 |\n| 1 | 1 |")
    assert [line for line, _ in problems(stale, _view)] == [1, 3]
    assert written(stale, _view) == SENTENCE + "\n" + TABLE
    empty = "dear takes <!-- results: ratio a --><!-- end --> of it.\n\n<!-- results: table a -->\n<!-- end -->\n"
    assert written(empty, _view) == written(written(empty, _view), _view) == SENTENCE + "\n" + TABLE
    assert list(problems(SENTENCE + "\n" + TABLE, _view)) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("A <!-- results: ratio a -->0.82<!-- end --> of it.", "says\n    <!-- results: ratio a -->0.82<!-- end -->\n"),
        ("A <!-- results: ratio a -->0.81 of it.", "1 times <!-- results: and 0 times <!-- end -->"),
        ("<!-- results: ratio a -->0.81<!-- end --> of it.", "take the line for HTML: begin it with a word"),
        ("* <!-- results: ratio a -->0.81<!-- end --> of it.", "begins with a source"),
        ("A <!-- results: table a -->| a | b |<!-- end -->", "gives a table: put <!-- end --> on a line of its own"),
    ],
)
def test_what_is_wrong_with_a_source_is_told(text: str, told: str) -> None:
    assert any(told in problem for _, problem in problems(text, _view))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("It takes 0.81 of it, 1.28 × L and 3 % more; 12 ms, 600 MB, 3 times.",
         ["0.81", "1.28 ×", "3 %", "12 ms", "600 MB", "3 times"]),
        ("| a | 497 | 12 hosts |", ["497", "12"]),
        ("× 3 of it", ["× 3"]),
        ("Twice as long, a\nthird of it, in five of these; a third one came; half; three times. `a third`",
         ["Twice", "a third", "five of these", "a third", "half", "three times"]),
        (SENTENCE + TABLE, []),
        ("Two hosts with 1 Gbit/s and 25 M parameters, torch 2.13.0, 8 GPUs, ResNet-50, `threshold_mb=4.5`.", []),
        ("At most ≤ 1.08; [0.5](a-0.5.md)\n\n    python -m x 0.5\n\n```\n0.5 s\n```\n", ["0.5"]),
    ],
)  # fmt: skip
def test_numbers_that_look_measured_need_a_source(text: str, numbers: list[str]) -> None:
    assert [number for _, number in unsourced(text, None)] == numbers


def test_only_the_section_that_measures_needs_sources() -> None:
    page = "# A\n\n0.1 s\n\n## What was measured\n\n0.2 s\n\n### More\n\n0.3 s\n\n## Other\n\n0.4 s\n"
    assert list(unsourced(page, "What was measured")) == [(7, "0.2 s"), (11, "0.3 s")]
    with pytest.raises(ValueError, match="no section 'What was found'"):
        list(unsourced(page, "What was found"))


def _results(folder: Path) -> Path:
    base: dict[str, Any] = {"model": "mlp", "size": 500, "network": "1gbit", "emulate_compute": "mlp@even:800"}
    runs = []
    for workers in (2, 4):
        for method, seconds in {
            "none": 0.8,
            "dear:threshold_mb=1": 1.2,
            "dear:threshold_mb=2": 1.1,
            "ddp": 1.5,
        }.items():
            result = result_of(Settings(method=method, workers=workers, **base), seconds * workers / 2, goodput=1e8)
            result["warmup_steps"] = 2
            if (workers, method) == (4, "ddp"):
                result["origin"] = {"commit": "abc-dirty", "torch": "2", "environment": {}}
            runs.append(result)
    (folder / "a").mkdir()
    found = result_of(Settings(method="dear:tune=True", workers=8, **base), 1.0, goodput=1e8)
    runs.append({**found, "warmup_steps": 40})
    verdicts = [{"met": met, "text": "too slow"} for met in (True, True, False, None)]
    (folder / "a" / "reports.json").write_text(json.dumps({"runs": runs, "bars": verdicts}))
    planned = {"none": 0.8, "dear": 1.0, "dear:threshold_mb=1": 1.2, "dear:threshold_mb=2,eager=True": 1.1, "ddp": 1.5}
    two = [result_of(Settings(method=name, workers=2, **base), took, goodput=1e8) for name, took in planned.items()]
    (folder / "b").mkdir()
    (folder / "b" / "reports.json").write_text(json.dumps({"runs": two, "bars": []}))
    _repeated(folder, base)
    (folder / "steps").mkdir()
    courses = [{"method": name, "seconds": [2.0, took]} for name, took in (("dear", 1.0), ("ddp", 3.4))]
    (folder / "steps" / "first.json").write_text(json.dumps({"courses": courses, "origin": {"commit": "0a"}}))
    (folder / "collectives").mkdir()
    row = {"operation": "all_gather", "bytes": 2**20, "n": 9, "ms": 4.0, "low_ms": 3.9, "high_ms": 4.2}
    row |= {"to_plain": 1.25, "plain_interval": [1.1, 1.5], "plain_ms": 3.2, "bus_mb_per_s": 100.0}
    row |= {
        "to_gloo": None,
        "gloo_ms": None,
        "to_wire": 0.9,
        "cpu_to_gloo": 0.5,
        "cpu_ns_per_byte": 1.0,
        "cores_busy": 0.25,
    }
    about = {"hosts": 2, "network": "1gbit", "backend": "mpi", "goodput": 1.2e8, "connections": 1}
    (folder / "accuracy").mkdir()
    ends = {"dear": ("abc", 2.0), "ddp": ("abc", 4.0), "ddp:bucket_mb=1": ("abc", 3.0)}
    tasks = {"good": ends, "mixed": {**ends, "ddp": ("def", 4.0)}, "dirty": {"dear": ("abc-dirty.1f", 2.0)}}
    for task, methods in tasks.items():
        curves = {
            name: {**run, "origin": {"commit": commit}, "runs": [run] * 6}
            for name, (commit, end) in methods.items()
            for run in [{"loss": [1.0, 0.5], "seconds": [1.0, end]}]
        }
        (folder / "accuracy" / f"{task}.json").write_text(json.dumps(curves))
    for task, last in (("bits", "3f800000"), ("bit", "3f800002")):
        ranks = [{"loss": "3f800000", "parameters": "ab"}]
        methods = {
            "dear": (1.0, ranks * 2),
            "ddp": (1.0 + (task == "bit") * 2**-23, [*ranks, {**ranks[0], "loss": last}]),
        }
        curves = {
            name: {**run, "origin": {"commit": "abc"}, "runs": [{**run, "seed": 1, "ranks": kept}] * 6}
            for name, (loss, kept) in methods.items()
            for run in [{"loss": [loss], "seconds": [1.0]}]
        }
        (folder / "accuracy" / f"{task}.json").write_text(json.dumps(curves))
    seeds = [
        {"loss": [3.0, 2.0], "seconds": [1.0, end], "held_out": {"loss": end, "accuracy": 0.5}} for end in (3.0, 5.0)
    ]
    of = {
        "dear": {"runs": seeds, "origin": {"commit": "abc"}},
        "co2": {"runs": [{**seeds[1], "origin": {"commit": "d-dirty.1"}}, seeds[0]], "origin": {"commit": "abc"}},
    }
    (folder / "learned.json").write_text(json.dumps(of))
    small = {**row, "bytes": 2**10}
    (folder / "collectives" / "two.json").write_text(json.dumps({**about, "rows": [small, row]}))
    ring = {**row, "operation": "reduce_scatter", "cores_busy": 0.5}
    same = {
        "bytes": 2**16,
        "to_plain": 2.5,
        "plain_interval": [2.0, 4.0],
        "plain_ms": 2.0,
        "bus_mb_per_s": 31.25,
    }  # messages of plain TCP
    rows = [small, row, ring, {**row, **same}, {**ring, **same}]
    (folder / "collectives" / "rings.json").write_text(json.dumps({**about, "rows": rows}))
    level = LevelRow("all_gather", 2**20, 9, 4.0, 3.9, 4.25, 6.0, 4.1, 0.66, 0.53, 0.79, 0.53, (0.6, 0.7))
    several = {**about, "ranks_per_host": 2, "rows": [asdict(level)]}
    (folder / "collectives" / "levels.json").write_text(json.dumps(several))
    (folder / "osdp").mkdir()
    of = {name: experiment_of(mode) for name, mode in (("a", "none"), ("b", "group_sharding"))}
    of["b"] |= {"peak_bytes": 2**30, "losses": [2.0, 1.5003]}
    told = {"network": "1gbit", "origin": {"commit": "abc-dirty.1"}, "runs": list(of.values())}
    (folder / "osdp" / "bert.json").write_text(json.dumps(told))
    alone = {"hosts": 1, "limit_bytes": 2**31, "sent_bytes": None}
    told |= {"origin": {"commit": "abc"}, "runs": [of["a"] | alone]}
    (folder / "osdp" / "gpt2.json").write_text(json.dumps(told))
    (folder / "prediction").mkdir()
    sealed = predicted_cells(real=0.9, slept=1.02, limited=0.8, method="fsdp:threshold_mb=4")
    (folder / "prediction" / "sealed.json").write_text(json.dumps({"cells": sealed, "origin": {"commit": "abc"}}))
    told_of = {"0a": {"date": "2026-11-20", "number": 70}, "0b": {"date": "2026-11-29", "number": 100}}
    (folder / "ages.json").write_text(json.dumps({"as_of": {"commit": "0b", **told_of["0b"]}, "commits": told_of}))
    return folder


def _repeated(folder: Path, base: dict[str, Any]) -> None:
    """Sweeps r, of six runs of each method that fall behind each other, and c, in whose five places dear loses in three."""
    steps = {
        "none": [0.8] * 6,
        "dear": [0.76, 0.78, 0.8, 0.8, 0.82, 0.83],
        "ddp": [1.0] * 6,
        "wfbp": [0.8] * 6,
        "mgwfbp": [0.8, 1.0],
    }
    runs = [
        result_of(Settings(method=name, workers=2, repeat=number, **base), seconds, cores_busy=0.25, busy_before=busy)
        for name, several in steps.items()
        for number, seconds in enumerate(several)
        for busy in [0.4 if (name, number) == ("mgwfbp", 1) else 0.01]
    ]
    places = {2: 1.0, 3: 1.004, 4: 1.014, 5: 1.03, 6: 0.9}
    lost = [
        result_of(Settings(method=name, workers=workers, **base), seconds)
        for workers, dear in places.items()
        for name, seconds in (("dear", dear), ("ddp", 1.0))
    ]
    for name, results in (("r", runs), ("c", lost)):
        (folder / name).mkdir()
        (folder / name / "reports.json").write_text(json.dumps({"runs": results, "bars": []}))


def predicted_cells(real: float, slept: float, limited: float, method: str) -> list[dict[str, Any]]:
    """Cells as bench.validation writes them, each with its prediction of a measured second."""
    emulated = {"emulate_compute": "mlp@even:800"}
    shares = (({}, real, 1.0), (emulated, slept, 0.3), ({**emulated, "workers": 4}, limited, 0.95))
    cells = [
        Cell(Settings(method=method, **about), seconds, 1.0, busy, busy == 1.0)  # type: ignore[arg-type]
        for about, seconds, busy in shares
    ]
    return [{**asdict(one), "error": one.error} for one in cells]


def experiment_of(mode: str) -> dict[str, Any]:
    """Figures as examples/osdp writes them."""
    about = {"model": "2 layers of 8", "parameters": 10**7, "ranks": 4, "hosts": 2, "samples": 4, "words": 8}
    measured = {"step_seconds": [0.5, 0.75, 0.75], "peak_bytes": 2**29, "limit_bytes": None, "sent_bytes": 4.1e7}
    return {"mode": mode, **about, **measured, "losses": [2.0, 1.5, 1.25]}


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("seconds a dear:threshold_mb=1 workers=2", "1.20"),
        ("ratio r dear ddp", "0.80 (0.76 – 0.83, n = 6)"),
        ("ratio r dear wfbp", "1.00 (0.95 – 1.04, n = 6, a tie)"),
        ("against r dear wfbp", "| what is trained | hosts | network | started by | wire/compute |"),
        ("against r dear wfbp", "| mlp@even:800 | 2 | 1gbit |  |"),
        ("against r dear wfbp", " `dear` | 0.800 | `wfbp` | 0.800 | 1.00 (0.95 – 1.04), a tie | 6 |"),
        ("methods r", "| `dear` | 0.800 | 0.740 – 0.853 | 18 | 1.00 (0.95 – 1.04), a tie | 6 |\n"),
        ("methods r", "| `mgwfbp`† | 0.900 | 0.820 – 0.975 | 6 |  | 2 |\n"),
        (
            "methods r",
            "\n\n† on a machine that others used before a run, or whose host gave its cores to other guests during one.",
        ),
        ("behind b", "0 of 1"),
        ("behind c", "3 of 5"),
        ("behind c within=0.01", "2"),
        ("peak_ratio r dear ddp", "1.00 (1.00 – 1.00, n = 6, a tie)"),
        ("proportion a wire compute workers=2", "1.25"),
        ("in_words proportion a compute wire workers=2", "three quarters"),
        ("in_words ratio r dear ddp", "three quarters"),
        ("all_bars", "| `a` | 2 | 1 | 1 |\n"),
        ("all_bars", "| **all** | "),
        ("all_bars", "\n* `a`: too slow"),
        (
            "all_bars",
            "\n* `collectives/rings`: reduce_scatter 1024 KB: time over plain TCP's 1.25 (1.10 – 1.50, n = 9), bar 1.08",
        ),
        ("sources", "| `steps/first.json` | 0a | 2026-11-20 | 30 | 9 |\n"),
        ("sources", "| `collectives/two.json` |  | unknown | unknown | unknown |\n"),
        ("sources", "| `learned.json` | abc, d | unknown | unknown | unknown |\n"),
        ("sources", "\n\nCounted from commit 0b."),
        ("peak a dear", "1024"),
        ("bars a", "2 met, 1 missed, 1 not judged"),
        ("methods a workers=2", "| `dear:threshold_mb=2` | 1.100 | 1.045 – 1.155 | 3 | 1 |\n| `ddp` | 1.500 |"),
        ("methods a all workers=2", "| `dear:threshold_mb=1` | 1.200 |"),
        ("pivot a show=peak columns=none;dear;ddp", "| mlp@even:800 | 2 | 1gbit |  | 1024 | 1024 | 1024 |\n"),
        ("steps first ddp", "5"),
        ("curve good dear ddp", "0.67 (0.67 – 0.67, n = 6)"),
        (
            "curves good",
            "| `dear` | 2.0 | 1.00 | 6 |\n| `ddp:bucket_mb=1` | 3.0 | 0.67 (0.67 – 0.67) | 6 |\n"
            "| `ddp` | 4.0 | 0.50 (0.50 – 0.50) | 6 |",
        ),
        ("curves good", "Losses (on rank 0) at the same step are the same to the digits that were kept."),
        (
            "curves bits",
            "Losses of all ranks at the same step, and parameters at the end, are the same in all bits.",
        ),
        ("curves bit", "Losses (mean over 2 ranks) at the same step are at most 1.2e-07 apart."),
        (
            "learned learned",
            "| `dear` | 4.0000 ± 1.4142 | 50.0 ± 0.0 |  | 2 |\n"
            "| `co2`\\* | 4.0000 ± 1.4142 | 50.0 ± 0.0 | +13.3 ± 75.4 | 2 |",
        ),
        ("seconds_to learned", "| `dear` | 4.0 ± 1.4 | 1.0 ± 0.0 | 4.0 ± 1.4 | 2 | 4.0 ± 1.4 | 2 |"),
        ("speed a", "| `dear:threshold_mb=2` | 1.10 | 2.20 |"),
        ("collectives two", "| all_gather | 1 MB | 9 | 4.00 | 3.90 – 4.20 | 1.25 (1.10 – 1.50) |  |"),
        (
            "rings rings",
            "| 1gbit | 1 | 64 KB | 0.5 | 0.40 (0.25 – 0.50) | 0.40 (0.25 – 0.50) | 9 | 50% |\n"
            "| 1gbit | 1 | 1 MB | 1 | 0.80 (0.67 – 0.91) | 0.80 (0.67 – 0.91) | 9 | 50% |",
        ),
        ("levels levels", "2 hosts with 2 ranks each, 1gbit, mpi, goodput 960 Mbit/s:"),
        ("levels levels", "| all_gather | 1 MB | 9 | 4.0 | 3.9 – 4.2 | 6.0 | 0.66 (0.60 – 0.70) | 0.5 | 0.8 | 0.5 |"),
        ("experiment bert", "| none\\* | 6 | 0.750 | 3 | 0.500 | 41 | 1.500000 |"),
        ("experiment bert", "| group_sharding\\* | 6 | 0.750 | 3 | 1.000 | 41 | 1.500300 |\n\n\\* with changes"),
        (
            "experiment bert",
            "2 hosts with 2 ranks each, 1gbit. Losses of the same step differ by 2e-04 of their values",
        ),
        ("experiment gpt2", "| of the limit | loss at the end |"),
        ("experiment gpt2", "| none | 6 | 0.750 | 3 | 0.500 | 25.0 % | 1.250000 |"),
        ("predicted sealed", "| all† | 3 | 10.0 % | -9.3 % | -20.0 % | 1 | 2 | 2 | 1 |"),
        ("predicted sealed", "| slept | 2 | 11.0 % | -9.0 % | -20.0 % | 1 | 1 | 1 | 1 |"),
        ("predicted sealed", "| slept, where cores were not the limit | 1 | 2.0 % | +2.0 % | +2.0 % | 1 | 1 | 0 | 1 |"),
        ("predicted sealed", "| real† | 1 | 10.0 % | -10.0 % | -10.0 % | 0 | 1 | 1 | 0 |\n\n† on a machine"),
        ("predicted_order sealed", "0 of 0"),
        ("predicted_methods sealed", "| `fsdp` | 2 | 11.0 % |"),
        ("experiment gpt2", "8; 4 ranks on one machine. Losses of the same step are equal in every digit."),
    ],
)
def test_views(source: str, given: str, tmp_path: Path) -> None:
    assert given in render(source, _results(tmp_path))


def test_a_table_may_leave_out_what_only_the_search_ran(tmp_path: Path) -> None:
    methods = re.compile(r"^\| (?:`(\w+)`|computation)", re.MULTILINE)
    assert "mgwfbp" in methods.findall(render("methods r", _results(tmp_path)))
    assert sorted(methods.findall(render("methods r repeated", tmp_path))) == ["", "ddp", "dear", "wfbp"]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("ratio a dear ddp workers=4", "does not speak of runs whose code was not committed"),
        ("ratio a dear horovod workers=2", "there are no such runs"),
        ("ratio b dear ddp", "has an interval, which takes six runs of both sides, not 1"),
        ("against b dear ddp", "has an interval, which takes six runs of both sides, not 1"),
        ("methods a", "3 groups of runs are meant, not one: mlp@even:800"),
        ("methods a workers=16", r"a has no runs with {'workers': '16'}"),
        ("methods a hosts=8", "names hosts; runs are told apart by model, "),
        ("methods d", "No such file"),
        ("curve mixed dear ddp", "its curves are of abc, def, not of one commit"),
        ("curves dirty", "its curves are of abc-dirty.1f, not of one commit"),
        ("pivot a show=peak", "columns= is missing"),
        ("in_words ratio a dear horovod workers=2", "there are no such runs"),
        ("in_words bars c", "0.00 has no words"),
        ("ratio r mgwfbp ddp", "or whose machine others used"),
        ("methodes a", "should begin with one of methods, against"),
    ],
)
def test_a_source_that_gives_nothing_says_why(source: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        render(source, _results(tmp_path))


def test_the_headline_has_a_line_for_all_that_dear_and_ddp_trained(tmp_path: Path) -> None:
    runs = json.loads((RESULTS / "launchers" / "reports.json").read_text())["runs"]
    lines = compared(group(runs))
    assert len(lines) == len(
        [one for one in group(runs) if {"dear", "ddp"} <= one.best.keys() and one.bound and one.wire]
    )
    assert [one.wire / one.compute for one in lines] == sorted(one.wire / one.compute for one in lines)  # type: ignore[operator,type-var]
    draw(lines, tmp_path / "headline.png")
    assert (tmp_path / "headline.png").stat().st_size > 10_000


def test_every_view_says_how_it_is_asked() -> None:
    assert all((view.__doc__ or "").startswith((f"{name} ", f"{name}:")) for name, view in VIEWS.items())
    assert (RESULTS / "launchers" / "reports.json").exists()
