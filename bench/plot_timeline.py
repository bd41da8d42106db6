"""``python -m bench.plot_timeline out-0.json out-1.json``: steps of a recorded timeline as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.program import at_least
from overlap.trace.picture import draw


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", nargs="+", type=Path, help="recorded by `python -m bench.train --timeline`, one per rank"
    )
    parser.add_argument("--output", type=Path, help="the picture (default: the first file's name with .png)")
    parser.add_argument("--steps", type=at_least(1), default=2, help="how many optimizer steps to show")
    parser.add_argument(
        "--skip", type=at_least(0), default=3, help="how many to leave out first, in which buckets are built"
    )
    arguments = parser.parse_args(argv)
    picture = arguments.output or arguments.files[0].with_suffix(".png")
    try:
        draw([str(file) for file in arguments.files], str(picture), arguments.steps, arguments.skip)
    except (OSError, ValueError) as error:  # no such file, no timeline, or one of fewer steps
        parser.error(str(error))
    print(picture)


if __name__ == "__main__":
    main()
