"""``make claims``, ``python -m bench.claims.repeat``: measures again what pages claim, and sets both side by side.

    python -m bench.claims.repeat --list                   each claim: what it says, its file, its age, its command
    python -m bench.claims.repeat --only README.md:110     some: pages, lines, or words of a source
    python -m bench.claims.repeat                          all, as root, for hours

It measures into build/claims and asks nothing. What was stopped goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from bench.claims import ages
from bench.claims.__main__ import pages
from bench.claims.commands import Command, command, unique
from bench.claims.pages import passages
from bench.claims.source import table
from bench.claims.views import RESULTS, read
from bench.program import ROOT, at_least, end_in_order
from bench.sweep.failures import reason_in
from bench.train.cores import Busy, look
from bench.train.origin import UNCOMMITTED, today

__all__ = ["Claim", "claims", "compared"]

FOLDER = Path("build", "claims")  # in ROOT, where commands run
_NO_CLAIMS = ("about", "all_bars", "sources")  # views of files, not of what was measured
# Programs that look at the machine, too, before each of their runs.
_KNOW_BUSY = (
    "benchmarks.py",
    *map("bench.{}".format, ("paired", "accuracy", "steps", "collectives", "validation", "integrations")),
)
_TOLD = re.compile(r"\((?:(?P<interval>[\d.]+ – [\d.]+), )?n = (?P<n>\d+)")


@dataclass(frozen=True)
class Claim:
    """What a page says, and what measures it again."""

    where: str  # README.md:110
    source: str
    says: str
    files: tuple[str, ...]
    commits: tuple[str, ...]
    commands: tuple[Command, ...]
    problem: str = ""  # why nothing measures it again


def claims(texts: Iterable[tuple[str, str]], wanted: Sequence[str], folder: Path, repeats: int) -> list[Claim]:
    """The claims of pages, each a name and a text, that have one of the words `wanted`; without any, all of them."""
    found = []
    for page, text in texts:
        for line, source, says in passages(text):
            view, where = source.split()[0], f"{page}:{line}"
            if view in _NO_CLAIMS or (wanted and not any(word in f"{where} {source}" for word in wanted)):
                continue
            try:
                _, asked = read(source, RESULTS)
                name = next(word for word in source.split() if word != "in_words")
                raw = {file: asked.raw(file) for file in dict.fromkeys(asked.read)}
                commits = dict.fromkeys(commit for data in raw.values() for commit in ages.commits_in(data))
                made = tuple(command(file, data, folder, repeats, (name, asked)) for file, data in raw.items())
                found.append(Claim(where, source, says, tuple(raw), tuple(commits), made))
            except ValueError as error:
                found.append(Claim(where, source, says, (), (), (), str(error)))
    return found


@cache
def _age(commit: str) -> str:
    return ages.since(commit)


def _ages(claim: Claim) -> str:
    """Of the oldest code, and of the youngest."""
    told = sorted({_age(commit) for commit in claim.commits})
    return " – ".join(dict.fromkeys([told[0], told[-1]])) if told else "unknown"


def listed(found: Sequence[Claim]) -> str:
    """Each claim with its file, age and command."""
    lines = []
    for one in found:
        lines += [f"{one.where}  {_short(one.says)}", f"    {one.source}"]
        lines += (
            [f"    {', '.join(f'docs/results/{file}' for file in one.files)}; code of {_ages(one)}"]
            if one.files
            else []
        )
        lines += [f"    {each}    # {_hours(sum(each.seconds.values()))}" for each in one.commands]
        lines += [f"    {one.problem}"] if one.problem else []
    return "\n".join(lines)


def _short(text: str) -> str:
    return text if "\n" not in text else f"a table of {max(text.count(chr(10)) - 1, 1)} rows"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds > 3600 else f"{seconds / 60:.0f} minutes"


def compared(found: Sequence[Claim], folder: Path) -> tuple[str, int]:
    """A table of what pages say and what was measured into `folder`, and how many claims have no measurement."""
    rows, tables, lacking = [], [], 0
    for one in found:
        try:
            measured, source = read(one.source, folder, strict=False)
            measured += "".join(dict.fromkeys(source.marks))
        except ValueError as error:
            measured, lacking = f"not measured: {one.problem or error}", lacking + 1
        if "\n" in measured:
            tables += [f"## {one.where}: {one.source}", "", measured, ""]
        told = _TOLD.search(measured)
        cells = [told["n"], told["interval"] or ""] if told else ["", ""]
        commands = "<br>".join(f"`{each}`" for each in one.commands)
        rows.append([f"{one.where}: `{one.source}`", _short(one.says), _short(measured), *cells, _ages(one), commands])
    head = ["claim", "page", "measured", "n", "interval", "age of the page's", "command"]
    return "\n".join(["# Claims", "", table(head, rows), "", *tables]), lacking


def _done(one: Command, folder: Path) -> bool:
    """Whether a file is there, of the code of today; programs that go on by themselves are asked."""
    path = folder / one.file
    if one.resumes or not path.exists():
        return False
    return set(ages.commits_in(ages.loaded(path))) == {today().commit.partition(UNCOMMITTED)[0]}


def _measure(one: Command, folder: Path, log: Path, *, busy: bool) -> bool:
    """Run a command's lines; whether all ended well. Raises :class:`Busy` where others use the machine."""
    (folder / one.file).parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as sink:
        for line in one.lines:
            look(allowed=busy)
            full = [sys.executable, *line, *["--busy"] * (busy and any(word in _KNOW_BUSY for word in line))]
            sink.write(" ".join(full) + "\n")
            sink.flush()
            if subprocess.run(full, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT).returncode:
                return False
    return True


def _whole(commands: Iterable[Command]) -> list[list[str]]:
    """Sweeps that were measured in parts are reported as a whole in the end."""
    lines = [one.lines[0] for one in commands if one.resumes]
    plain = [line[: line.index("--only")] if "--only" in line else line for line in lines]
    return [[sys.executable, *line, "--report"] for line in dict.fromkeys(plain)]


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    about = f"{os.cpu_count()} cores, {memory:.0f} GiB of memory, {platform.system()} {platform.machine()}"
    return f"{about}, Python {platform.python_version()}, torch {torch.__version__}"


def run(found: Sequence[Claim], folder: Path, *, busy: bool) -> int:
    """Measure, and leave the report; 0 where every claim was measured."""
    commands = list({str(one): one for claim in found for one in claim.commands}.values())
    left = [one for one in commands if not _done(one, folder)]
    say(f"{len(found)} claims by {len(commands)} commands, {len(left)} of them to run or to go on with")
    say(f"at most {_hours(unique(left))}, on this machine: {_machine()}")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    try:
        for number, one in enumerate(left, 1):
            log = folder / "logs" / f"{number}.log"
            say(f"{number} of {len(left)}, {_hours(sum(one.seconds.values()))}: {one}")
            if not _measure(one, folder, log, busy=busy):
                say(f"that failed, and is left out: {reason_in(log.read_text(errors='replace'))} ({log})")
    except (KeyboardInterrupt, Busy) as reason:
        say(f"stopped{f': {reason}' if isinstance(reason, Busy) else ''}; the same command goes on with what is left")
        return 130 if isinstance(reason, KeyboardInterrupt) else 2
    for line in _whole(one for one in commands if (folder / one.file).exists()):
        subprocess.run(line, cwd=ROOT, stdout=subprocess.DEVNULL)
    text, lacking = compared(found, folder)
    (folder / "report.md").write_text(text)
    print(text)
    say(f"{len(found) - lacking} of {len(found)} claims were measured: {folder / 'report.md'}")
    return 1 if lacking else 0


def say(text: str) -> None:
    print(f"claims: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORDS", help="claims that have them: README.md, …"
    )
    parser.add_argument("--repeats", type=at_least(1), default=6, help="of each method, in turn (default: %(default)s)")
    parser.add_argument(
        "--busy", action="store_true", help="measure while others use the machine, and mark the results"
    )
    arguments = parser.parse_args()
    texts = [(str(page.relative_to(ROOT)), page.read_text()) for page in pages()]
    found = claims(texts, arguments.only, FOLDER, arguments.repeats)
    if not found:
        say(f"no claim has {' or '.join(map(repr, arguments.only))}; --list shows all")
        return 2
    if arguments.list:
        print(listed(found))
        commands = list({str(one): one for claim in found for one in claim.commands}.values())
        say(f"{len(found)} claims by {len(commands)} commands, {_hours(unique(commands))} in all")
        return 0
    if os.geteuid() != 0:
        say("emulated links need root")
        return 2
    if UNCOMMITTED in today().commit:
        say("the code has changes that are not committed: pages may not quote these results")
    end_in_order()
    return run(found, ROOT / FOLDER, busy=arguments.busy)


if __name__ == "__main__":
    sys.exit(main())
