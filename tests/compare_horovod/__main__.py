"""``python -m tests.compare_horovod [--package wfbp]``: real Horovod and ours, call by call.

Exit status 1: something differs that is not documented; 2: it could not be run, or there was nothing to compare.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.compare_horovod import scripts
from tests.compare_horovod.calls import GROUPS
from tests.compare_horovod.documented import DIFFERENCES
from tests.compare_horovod.job import JobFailed, answers, command, run
from tests.compare_horovod.judgement import Finding, Verdict, explained, judge, report
from tests.compare_horovod.outcome import Likeness
from tests.compare_horovod.signature import ABSENT, follows

PACKAGES = ("dear", "wfbp", "mgwfbp", "bytescheduler_adapter", "oss", "fsdp", "co2")
PARTS = ("signatures", *GROUPS, "scripts")
HOROVOD = "horovod.torch"
# Local SGD: its steps are not Horovod's, and its optimizer takes other arguments.
NOT_SYNCHRONOUS = {"co2": ("optimizer", "scripts")}


def _names(library: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="dear-compare-") as folder:
        output = Path(folder) / "output"
        status = run(command(1, ["-m", "tests.compare_horovod.signature", library]), 120, output)
        lines = output.read_text(errors="replace").splitlines()
        if status != 0:
            raise JobFailed("\n".join(lines[-20:]))
        found: dict[str, str] = json.loads(next(line for line in lines if line.startswith("{")))
        return found


def _signatures(ours: str) -> Iterator[Finding]:
    theirs, mine = _names(HOROVOD), _names(ours)
    for name, text in theirs.items():
        other = mine.get(name, ABSENT)
        subject = f"signatures/{name}"
        if follows(text, other):
            yield Finding("signatures", subject, Verdict.EQUAL)
        else:
            yield explained("signatures", subject, ((text, other),), DIFFERENCES)


def _tell(what: str) -> None:
    print(f"({what})", end=" ", flush=True)


def _calls(group_name: str, ranks: int, ours: str, seconds: float) -> Iterator[Finding]:
    group = GROUPS[group_name]
    theirs, mine = (answers(library, group, ranks, seconds, _tell) for library in (HOROVOD, ours))
    for call in group.calls:
        yield judge(_part(group_name, ranks), f"{group_name}/{call}", theirs[call], mine[call], DIFFERENCES)


def _scripts(ranks: int, ours: str) -> Iterator[Finding]:
    part = _part("scripts", ranks)
    with tempfile.TemporaryDirectory(prefix="dear-compare-") as name:
        folders = {library: Path(name) / library for library in (HOROVOD, ours)}
        for library, folder in folders.items():
            folder.mkdir()
            scripts.prepare(library, folder)
        for script in scripts.SCRIPTS:
            _tell(script.name)
            theirs, mine = (scripts.results(script, folder, ranks) for folder in folders.values())
            subject = f"scripts/{script.name}"
            likeness = scripts.compare(theirs, mine)
            if likeness is not Likeness.DIFFERENT:
                yield Finding(part, subject, Verdict.ROUNDED if likeness is Likeness.ROUNDED else Verdict.EQUAL)
            else:
                yield explained(part, subject, ((theirs, mine),), DIFFERENCES, ranks)


def _part(name: str, ranks: int) -> str:
    return f"{name}, {ranks} rank{'s' if ranks > 1 else ''}"


def _compared(args: argparse.Namespace, ours: str) -> Iterator[tuple[str, Iterator[Finding]]]:
    left_out = NOT_SYNCHRONOUS.get(ours, ())
    chosen = [part for part in PARTS if part in (args.only or PARTS) and part not in left_out]
    if "signatures" in chosen:
        yield "signatures", _signatures(ours)
    for ranks in args.ranks:
        for name in chosen:
            if name in GROUPS and ranks in GROUPS[name].sizes:
                yield _part(name, ranks), _calls(name, ranks, ours, args.seconds)
    for ranks in args.ranks if "scripts" in chosen else ():
        yield _part("scripts", ranks), _scripts(ranks, ours)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compare_horovod", description=__doc__)
    parser.add_argument("--package", choices=PACKAGES, default="dear", help="whose hvd is compared")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=8, help="limit of a call (8); more on a busy machine")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="a few parts of the comparison")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("horovod") is None:
        print("compare-horovod: Horovod is not there; remedy: run `make horovod` first (minutes)", file=sys.stderr)
        return 2
    ours = args.package
    print(f"Horovod {importlib.metadata.version('horovod')} and {args.package}, torch {torch.__version__}", flush=True)
    for part in NOT_SYNCHRONOUS.get(ours, ()):
        print(f"without {part}: {ours} is not synchronous")
    findings: list[Finding] = []
    started = time.monotonic()
    try:
        for part, found in _compared(args, ours):
            print(f"  {part} ...", end=" ", flush=True)
            begun = time.monotonic()
            new = list(found)
            findings += new
            odd = sum(finding.verdict is Verdict.UNDOCUMENTED for finding in new)
            remark = f", {odd} not documented" if odd else ""
            print(f"{len(new)} in {time.monotonic() - begun:.0f} s{remark}", flush=True)
    except JobFailed as error:
        print(f"\ncompare-horovod: {error}", file=sys.stderr)
        return 2
    if not findings:
        asked = ", ".join(args.only or PARTS)
        print(
            f"compare-horovod: nothing was compared: {args.package} has no calls in {asked} at {args.ranks} rank(s); "
            "remedy: leave out --only or --ranks",
            file=sys.stderr,
        )
        return 2
    complete = args.only is None and len(args.ranks) == 3
    told = report(findings, DIFFERENCES, ours, complete)
    print(f"\n{told}\n({time.monotonic() - started:.0f} s)")
    return int(any(finding.verdict is Verdict.UNDOCUMENTED for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
