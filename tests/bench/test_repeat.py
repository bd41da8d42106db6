"""Claims of pages: the command that measures each again, how old its code is, and what came of it."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.claims import ages, commands, repeat
from bench.claims.__main__ import pages
from bench.claims.commands import command, unique
from bench.claims.source import Source
from bench.claims.views import RESULTS
from bench.methods.spec import family_of
from bench.sweep.table import read, select
from bench.train.cores import Busy
from bench.train.origin import Origin
from tests.bench.test_origin import git, repository
from tests.harness import ROOT

MEASURED = ["README.md", "docs/performance.md"]


@pytest.fixture(scope="module")
def found() -> list[repeat.Claim]:
    texts = [(str(page.relative_to(ROOT)), page.read_text()) for page in pages()]
    return repeat.claims(texts, [], Path("build/claims"), 6)


def test_every_claim_has_a_file_and_a_command(found: list[repeat.Claim]) -> None:
    assert {one.where.partition(":")[0] for one in found} >= set(MEASURED)
    assert [(one.where, one.source, one.problem) for one in found if one.problem] == []
    assert all(one.files and one.commands for one in found)


def test_commands_of_sweeps_select_runs_that_are_there(found: list[repeat.Claim]) -> None:
    sweeps = {str(each): each for one in found for each in one.commands if each.resumes}
    assert len(sweeps) > 10
    for each in sweeps.values():
        (line,) = each.lines
        sweep = read(ROOT / line[1], int(line[line.index("--repeats") + 1]))
        only = [word for before, word in itertools.pairwise(line) if before == "--only"]
        assert select(sweep, only).runs
        assert each.seconds


def test_a_claim_of_two_methods_runs_these_and_no_other(found: list[repeat.Claim]) -> None:
    wanted = "ratio launchers dear horovod emulate_compute=mlp@even:2400 launcher=torchrun"
    one = next(one for one in found if one.source == wanted)
    (line,) = one.commands[0].lines
    methods = {word.partition("=")[2].partition(":")[0] for word in line if word.startswith("method=")}
    assert methods == {"dear", "horovod"}
    assert "emulate_compute=mlp@even:2400" in line
    assert unique([one.commands[0]] * 2) == sum(one.commands[0].seconds.values())


def test_a_claim_beside_the_fastest_runs_those_that_were_run_again(found: list[repeat.Claim]) -> None:
    wanted = "ratio tuned-baselines dear ddp launcher=torchrun"
    (line,) = next(one for one in found if one.source == wanted).commands[0].lines
    raw = json.loads((RESULTS / "tuned-baselines" / "reports.json").read_text())["runs"]
    again = {run["settings"]["method"] for run in raw
             if run["settings"]["repeat"] == 5 and run["settings"]["launcher"] == "torchrun"}  # fmt: skip
    few = {method for method in again if family_of(method) in ("dear", "ddp")}
    assert len(few) == 2
    assert {word.removeprefix("method=") for word in line if word.startswith("method=")} == few


PAIRED = {
    "first": "dear", "second": "ddp:bucket_mb=1", "seconds": {"first": [0.5] * 8, "second": [0.5] * 8}, "cpu_seconds": {},
    "about": {"task": "gpt2", "workers": 2, "network": "1gbit", "launcher": "mpi", "transport": "auto", "steps": 6},
}  # fmt: skip
RINGS = {"hosts": 2, "network": "1gbit", "backend": "tcp", "connections": 4,
         "rows": [{"operation": "all_gather", "bytes": 1024, "n": 3, "ms": 1.0}]}  # fmt: skip
STEPS = {"about": "70 steps of mlp@even:900 on 2 hosts, 1gbit, 250mbit after 30 steps; from the first on.",
         "courses": [{"method": "dear", "seconds": [1.0]}]}  # fmt: skip
CURVES = {
    "dear": {"loss": [1.0] * 5, "seconds": [9.0], "runs": [{}, {}]},
    "co2": {"loss": [1.0] * 7, "seconds": [9.0], "runs": [{}]},
}
TRIES = [{"rate": rate, "seconds": 2.0} for rate in (0.001, 0.01)]
SEARCHED = {"dear": {**CURVES["dear"], "search": {"steps": 3, "tries": TRIES}}}
WITHIN = {"library": "accelerate", "workers": 2, "network": "1gbit", "launcher": "mpi", "steps": 20,
          "tried": ["ddp:bucket_mb={..,1,4}"], "searched": {"ddp:bucket_mb=1": CURVES["dear"]},
          "pairs": [{"ddp": CURVES["dear"], "dear": CURVES["dear"]}] * 7, "one_process": None}  # fmt: skip
PREDICTED = {"cells": [{"settings": {"method": "dear"}, "measured": 1.0}]}
MODES = {"network": "1gbit", "arguments": ["--layers", "2"], "runs": [{"hosts": 2, "ranks": 4, "step_seconds": [1.0]}]}


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("paired/a.json", PAIRED, "-m bench.paired dear ddp:bucket_mb=1 --task gpt2 --workers 2 --network 1gbit "
         "--launcher mpi --transport auto --steps 6 --ranks-per-host 1 --blocks 8 --repeats 6 --json out/paired/a.json"),
        ("collectives/a.json", RINGS, "-m bench.collectives --hosts 2 --ranks-per-host 1 --network 1gbit --connections 4 "
         "--launcher torchrun --ops all_gather --sizes 1024 --json out/collectives/a.json"),
        ("steps/a.json", STEPS, "-m bench.steps --methods dear --steps 70 --model mlp --milliseconds 900 --workers 2 "
         "--network 1gbit --then 250mbit --after 30 --json out/steps/a.json"),
        ("local-sgd/seconds.json", CURVES, "-m bench.accuracy --task language --workers 2 --network 100mbit --steps 5 "
         "--seeds 2 --output out/local-sgd/seconds.png --methods dear && python -m bench.accuracy --task language "
         "--workers 2 --network 100mbit --steps 7 --seeds 2 --output out/local-sgd/seconds.png --add --methods co2"),
        ("local-sgd/seconds.json", SEARCHED, "-m bench.accuracy --task language --workers 2 --network 100mbit "
         "--steps 5 --seeds 2 --output out/local-sgd/seconds.png --rates 0.001 0.01 --search-steps 3 --methods dear"),
        ("accuracy/gpt2-mpi.json", {"dear": CURVES["dear"]}, "-m bench.accuracy --task gpt2 --workers 2 --network 1gbit "
         "--launcher mpi --steps 5 --seeds 6 --output out/accuracy/gpt2-mpi.png --methods dear"),
        ("integrations/a.json", WITHIN, "-m bench.integrations --library accelerate --workers 2 --network 1gbit "
         "--launcher mpi --steps 20 --pairs 6 --json out/integrations/a.json --ddp 'ddp:bucket_mb={..,1,4}'"),
        ("osdp/bert-2.json", MODES, "-m bench.experiments bert --hosts 2 --ranks-per-host 2 --network 1gbit "
         "--json out/osdp/bert-2.json -- --layers 2"),
        ("prediction/sealed-runs.json", PREDICTED, "-m bench.validation configs/sweeps/sealed.toml "
         "--sealed out/prediction/sealed.json --output out/prediction --seal && python -m bench.validation "
         "configs/sweeps/sealed.toml --sealed out/prediction/sealed.json --output out/prediction --uncommitted "
         "--json out/prediction/sealed-runs.json"),
    ],
)  # fmt: skip
def test_a_file_says_how_it_is_made(name: str, data: dict[str, Any], told: str) -> None:
    asked = ("view", Source(RESULTS, (), {}))
    made = command(name, data, Path("out"), 6, asked)
    assert str(made) == f"python {told}"
    assert all(shlex.join(line) in str(made) for line in made.lines)
    assert sum(made.seconds.values()) > 0


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("new/reports.json", {"title": "What nobody sweeps"}, "no table in configs/sweeps has the title 'What nobody"),
        ("new/a.json", {}, "nothing says how new/a.json is made"),
        ("accuracy/new.json", {}, "nothing says how accuracy/new.json is made"),
        ("steps/a.json", {"about": "steps"}, "does not say how it was made, but 'steps'"),
    ],
)  # fmt: skip
def test_a_file_that_says_nothing_is_told(name: str, data: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        command(name, data, Path("out"), 6, ("view", Source(RESULTS, (), {})))


PAGE = "".join(f"<!-- results: paired {name} -->\n0.81\n<!-- end -->\n" for name in "ab")


def _paired(folder: Path, name: str, commit: str) -> None:
    (folder / "paired").mkdir(parents=True, exist_ok=True)
    about = {**PAIRED["about"], "origin": {"commit": commit}}  # type: ignore[dict-item]
    (folder / "paired" / f"{name}.json").write_text(
        json.dumps({**PAIRED, "cpu_seconds": PAIRED["seconds"], "about": about})
    )


def test_claims_are_measured_once_and_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, folder, tried = tmp_path / "kept", tmp_path / "build", list[str]()
    for name in ("a", "b"):
        _paired(kept, name, "0a")
    monkeypatch.setattr(repeat, "RESULTS", kept)
    monkeypatch.setattr(repeat, "today", lambda: Origin("0b", "2", {}))
    found = repeat.claims([("README.md", PAGE)], [], folder, 6)
    assert [(one.where, one.files, one.commits) for one in found] == [
        ("README.md:1", ("paired/a.json",), ("0a",)),
        ("README.md:4", ("paired/b.json",), ("0a",)),
    ]
    assert [one.source for one in repeat.claims([("README.md", PAGE)], ["paired b"], folder, 6)] == ["paired b"]
    refused = [True]

    def measure(one: commands.Command, into: Path, _log: Path, *, busy: bool) -> bool:
        if one.file == "paired/b.json" and refused.pop():
            raise Busy("others use it")
        tried.append(one.file)
        _paired(into, one.file[7:-5], "0b")
        return True

    monkeypatch.setattr(repeat, "_measure", measure)
    assert repeat.run(found, folder, busy=False) == 2
    assert "others use it; the same command goes on with what is left" in capsys.readouterr().err
    refused.append(False)
    assert repeat.run(found, folder, busy=False) == 0
    assert tried == ["paired/a.json", "paired/b.json"]
    text = (folder / "report.md").read_text()
    assert text in capsys.readouterr().out
    assert "| README.md:1: `paired a` | 0.81 | a table of 1 rows |  |  | unknown | `python -m " in text
    assert "| 1.00 (1.00 – 1.00), a tie |" in text
    refused[:] = [False]
    _paired(folder, "b", "0a")  # of other code
    assert repeat.run(found, folder, busy=False) == 0
    assert tried == ["paired/a.json", "paired/b.json", "paired/b.json"]


def test_the_list_names_file_command_and_hours(found: list[repeat.Claim]) -> None:
    text = repeat.listed([one for one in found if one.where.startswith("README")])
    assert "    docs/results/launchers/reports.json; code of " in text
    assert "    python benchmarks.py configs/sweeps/launchers.toml --output " in text
    assert " minutes\n" in text


def test_ages_are_read_from_git_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "code"
    root.mkdir()
    repository(root)
    first = subprocess.check_output(["git", "-C", root, "rev-parse", "--short=10", "HEAD"], text=True).strip()
    (root / "code.py").write_text("b\n")
    git(root, "commit", "-a", "-m", "second")
    monkeypatch.setattr(ages, "ROOT", root)
    results = tmp_path / "results"
    _paired(results, "a", f"{first}-dirty.1")
    assert ages.refresh(results)
    assert not ages.refresh(results)
    told = json.loads((results / "ages.json").read_text())
    assert (told["commits"][first]["number"], told["as_of"]["number"]) == (1, 2)
    assert ages.since(first).endswith(", 1 commits ago")
    assert ages.since("0123456789") == "unknown"
    row = ages.sources(Source(results, (), {})).splitlines()[2]
    assert row.startswith(f"| `paired/a.json` | {first} | 20")
    assert row.endswith(" | 1 | 0 |")
    _paired(results, "b", "0123456789")
    assert not ages.refresh(results)  # git does not know it
    assert "| unknown |" in ages.sources(Source(results, (), {}))
    told["commits"][first]["number"] = 3  # of a branch that was rebased onto less
    (results / "ages.json").write_text(json.dumps(told))
    assert ages.sources(Source(results, (), {})).splitlines()[2].endswith(" | unknown | 0 |")
