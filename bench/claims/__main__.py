"""``python -m bench.claims``: holds the numbers in README.md and docs against the results they come from.

    python -m bench.claims              exits with 1 where a page says something else than the results, or names no source
    python -m bench.claims --write      writes what the results say into the pages
    python -m bench.claims --show "ratio launchers dear ddp model=resnet50 launcher=torchrun"      recomputes a number

A measured number, or a whole table, stands between its source and an end, which readers do not see:

    dear takes <!-- results: ratio tuned-baselines dear ddp launcher=mpi -->0.80 (0.79 – 0.81, n = 6)<!-- end -->.

    <!-- results: methods tuned-baselines launcher=mpi -->
    | method | … |
    <!-- end -->

The functions in `bench/claims/sweeps.py`, `curves.py`, `collectives.py`, `paired.py`, `experiments.py`, `pipelines.py`,
`integrations.py`, `predictions.py`, `judged.py` and `ages.py` are what a source may ask for; `in_words` before one says its
number as a word. In the sections that `bench/claims/pages.py` names, every number in a table needs one, and in a sentence
every one that looks measured: a decimal, a factor, seconds, a percentage, MB, twice, a third. Settings and commands stand
in code font, limits behind ≤, and need none.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.claims.ages import refresh
from bench.claims.pages import MEASURED, problems, unsourced, written
from bench.claims.views import RESULTS, render
from bench.program import ROOT

__all__ = ["main", "pages"]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write what the results say into the pages")
    parser.add_argument("--show", metavar="SOURCE", help="say what the results say to a source, and nothing else")
    arguments = parser.parse_args()
    if arguments.show is not None:
        try:
            print(render(arguments.show))
        except ValueError as error:
            parser.error(str(error))
        return 0
    if arguments.write and refresh(RESULTS):
        print("wrote docs/results/ages.json")
    wrong = 0
    for page in pages():
        name, text = str(page.relative_to(ROOT)), page.read_text()
        if arguments.write:
            try:
                new = written(text)
            except ValueError as error:
                new = text
                sys.stderr.write(f"{name} stays as it was: {error}\n")
            if new != text:
                page.write_text(new)
                print(f"wrote {name}")
            text = new
        found = list(problems(text))
        if name in MEASURED:
            found += [(line, f"{number!r} names no source") for line, number in unsourced(text, MEASURED[name])]
        for line, problem in sorted(found):
            print(f"{name}:{line}: {problem}")
        wrong += len(found)
    if wrong:
        print(f"{wrong} problems; python -m bench.claims --write corrects numbers that have a source")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
