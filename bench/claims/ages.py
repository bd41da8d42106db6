"""How old the code of results is: read from git once, kept beside the results, and told by a view.

``docs/results/ages.json`` has the date of every commit that results name, and how many commits lead to it. So pages can be
checked where there is no git. ``python -m bench.claims --write`` asks git as soon as results name another commit.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from bench.claims.source import Source, table
from bench.program import ROOT
from bench.train.origin import UNCOMMITTED

__all__ = ["AGES", "commits_in", "loaded", "raw_files", "refresh", "since"]

_FILE = "ages.json"


def raw_files(folder: Path) -> list[str]:
    """The files of results, by their names in the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json") if path.name != _FILE)


def loaded(path: Path) -> Any:
    """What a file of results has."""
    return json.loads(path.read_text())


def commits_in(results: Any) -> Iterator[str]:
    """The commits of all origins that results name, without the changes that were not committed."""
    if isinstance(results, dict):
        origin = results.get("origin")
        if isinstance(origin, dict) and "commit" in origin:
            yield str(origin["commit"]).partition(UNCOMMITTED)[0]
        for value in results.values():
            yield from commits_in(value)
    elif isinstance(results, list) and results and isinstance(results[0], dict):
        for value in results:
            yield from commits_in(value)


def _git(*words: str) -> str | None:
    """What git says; None where it is not there, or does not know what is asked for."""
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, check=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _told(commit: str) -> dict[str, Any] | None:
    day, number = _git("show", "-s", "--format=%cs", commit), _git("rev-list", "--count", commit)
    return None if day is None or number is None else {"date": day, "number": int(number)}


def since(commit: str) -> str:
    """How old a commit is now: its date, and the commits since; "unknown" where git does not know it."""
    day, number = _git("show", "-s", "--format=%cs", commit), _git("rev-list", "--count", f"{commit}..HEAD")
    return "unknown" if day is None or number is None else f"{day}, {number} commits ago"


def refresh(folder: Path) -> bool:
    """Ask git of the commits that results name. Whether that was news, and was written: ages are counted from then on."""
    path = folder / _FILE
    known = loaded(path)["commits"] if path.exists() else {}
    named = {commit for name in raw_files(folder) for commit in commits_in(loaded(folder / name))}
    told = {commit: _told(commit) or known.get(commit) for commit in sorted(named)}
    commits = {commit: one for commit, one in told.items() if one is not None}
    head = _git("rev-parse", "--short=10", "HEAD")
    if head is None or commits == known:
        return False
    as_of = {"commit": head, **(_told(head) or {})}
    path.write_text(json.dumps({"as_of": as_of, "commits": commits}, indent=1) + "\n")
    return True


def _range(values: list[Any]) -> str:
    return f"{min(values)} – {max(values)}" if min(values) != max(values) else str(values[0])


def sources(source: Source) -> str:
    """sources: every file of results, the code that it is of, and how old that was when the last results came."""
    known = source.raw(_FILE) if (source.folder / _FILE).exists() else {"as_of": None, "commits": {}}
    cells = []
    for name in raw_files(source.folder):
        commits = list(dict.fromkeys(commits_in(source.raw(name))))
        told = [known["commits"].get(commit) for commit in commits]
        if not commits or None in told:
            cells.append([f"`{name}`", ", ".join(commits), "unknown", "unknown", "unknown"])
            continue
        dates, numbers = [one["date"] for one in told], [one["number"] for one in told]
        days = [(date.fromisoformat(known["as_of"]["date"]) - date.fromisoformat(day)).days for day in dates]
        ages = [known["as_of"]["number"] - number for number in numbers]
        # A branch that was rebased has other commits, and may have had more of them.
        ago = _range(ages) if min(ages) >= 0 else "unknown"
        cells.append([f"`{name}`", ", ".join(commits), _range(dates), ago, _range(days)])
    text = table(["file in `docs/results`", "code", "of", "commits ago", "days ago"], cells)
    return f"{text}\n\nCounted from commit {known['as_of']['commit']}." if known["as_of"] else text


AGES = (sources,)
