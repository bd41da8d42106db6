"""``python -m bench.plot_timeline out-0.json out-1.json``: steps of a recorded timeline as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from overlap.timeline_picture import draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", nargs="+", type=Path, help="recorded by `python -m bench.train --timeline`, one per rank"
    )
    parser.add_argument("--output", type=Path, help="the picture (default: the first file's name with .png)")
    parser.add_argument("--steps", type=int, default=2, help="how many optimizer steps to show")
    parser.add_argument("--skip", type=int, default=3, help="how many to leave out first, in which buckets are built")
    arguments = parser.parse_args()
    picture = arguments.output or arguments.files[0].with_suffix(".png")
    draw([str(file) for file in arguments.files], str(picture), arguments.steps, arguments.skip)
    print(picture)


if __name__ == "__main__":
    main()
