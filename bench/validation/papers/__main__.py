"""``python -m bench.validation.papers``: what papers have published, and what ``dear.predict`` says of the same jobs.

    python -m bench.validation.papers                            configs/papers.toml; about a minute, on any machine
    python -m bench.validation.papers --report docs/results/prediction/papers.md --json docs/results/prediction/papers.json

Nothing is measured, and no number is fitted to what was published.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.program import ROOT
from bench.train.origin import UNCOMMITTED, today
from bench.validation.papers.judge import Compared, pairs
from bench.validation.papers.published import Published, read
from bench.validation.papers.report import draw, markdown
from bench.validation.papers.simulation import Claimed, claimed, predicted
from overlap.plan.simulation.profile import load

DEFAULT = ROOT / "configs" / "papers.toml"


def compare(published: Published, *, own_pace: bool = False) -> list[Compared]:
    """All jobs, compared; with the profile's own pace, only jobs that there is a profile of."""
    found = []
    for source in published.sources:
        for cell in source.cells:
            if own_pace and not cell.has_profile:
                continue
            predictions = predicted(source, cell, own_pace=own_pace)
            steps = {name: (one.step, one.best, one.worst) for name, one in predictions.items()}
            alone = next(iter(predictions.values())).alone
            nbytes = sum(layer.nbytes for layer in load(cell.model, cell.profile_device, cell.profile_batch).layers)
            found.append(Compared(cell, steps, source.base, alone, nbytes))
        say(f"{source.name}{', with the pace of profiles' if own_pace else ''}: done")
    return found


def grid(published: Published) -> list[Claimed]:
    """All rows of all claims, predicted."""
    found = []
    for claim in published.claims:
        for network in claim.up_to:
            for profile in claim.profiles:
                found += claimed(claim, network, profile)
            say(f"{claim.name}, {network}")
    return found


def data(compared: Sequence[Compared], own_pace: Sequence[Compared], claims: Sequence[Claimed]) -> dict[str, object]:
    """All results, for programs."""

    def job(one: Compared) -> dict[str, object]:
        judged = [{"fast": p.fast, "slow": p.slow, "verdict": p.verdict.value} for p in pairs(one.cell, one.steps)]
        return {**asdict(one), "pairs": judged}

    def row_of(row: Claimed) -> dict[str, object]:
        steps = {one.method: one.step for one in (row.method, *row.others)}
        return {"network": row.network, "model": row.model, "group": row.group, "steps": steps}

    return {
        "jobs": list(map(job, compared)),
        "jobs_with_own_pace": list(map(job, own_pace)),
        "claims": list(map(row_of, claims)),
        "origin": today().to_dict(),
    }


def say(text: str) -> None:
    print(f"bench.validation.papers: {text}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", type=Path, default=DEFAULT, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every prediction here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write Markdown here, and the picture beside it")
    arguments = parser.parse_args()
    try:
        published = read(arguments.table)
        compared, own_pace = compare(published), compare(published, own_pace=True)
        claims = grid(published)
    except (OSError, ValueError) as error:
        say(str(error))
        return 2
    origin = today()
    if UNCOMMITTED in origin.commit:
        say("the code has changes that are not committed: docs should not quote these results")
    picture = None
    if arguments.report is not None:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        picture = draw(published, compared, claims, arguments.report.with_suffix(".png"))
    about = f"Simulated, not measured, by the code of commit {origin.commit}."
    text = markdown(about, published, compared, own_pace, claims, picture)
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(data(compared, own_pace, claims), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
