"""One of the scripts, with each of its strategies."""

from __future__ import annotations

import sys

import dear
from tests.local_decisions import SCENARIOS


def main(name: str) -> None:
    dear.init()
    run, strategies = SCENARIOS[name]
    for strategy in strategies:
        run(strategy)
    print(f"rank {dear.rank()} came to the end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
