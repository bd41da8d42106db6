"""Starts jobs that run random scripts, and says which went wrong; with `--worker`, one of their ranks."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

import dear
from tests.fuzz.script import Script, generate, sharded, smaller
from tests.fuzz.training import STRATEGIES, check
from tests.harness import ROOT, Result, run_ranks

_ENV = {"DEAR_STALL_WARN_SECONDS": "3", "DEAR_STALL_ABORT_SECONDS": "240"}
_SECONDS, _MORE_SECONDS = 3.0, 120.0  # of a script, and what a job gets beside its scripts
_CHUNK = 25


def job_seconds(scripts: int) -> float:
    """What a job of so many scripts may take: several times what it does, since the machine may be busy."""
    return _MORE_SECONDS + _SECONDS * scripts


def script_of(seed: int, ranks: int, strategy: str) -> Script:
    """The one that `strategy` runs: early updates cannot honour all, nor can sharded parameters."""
    script = generate(seed, ranks, plain=strategy == "dear-eager")
    return sharded(script) if strategy == "fsdp" else script


def work(seeds: Sequence[int], strategies: Sequence[str], less: Sequence[int]) -> None:
    """In every rank: all seeds with all strategies; prints what is wrong, and goes on. `less`: see :func:`shrunk`."""
    dear.init()
    for seed in seeds:
        for strategy in strategies:
            if dear.rank() == 0:
                print(f"begins {seed} {strategy}", flush=True)
            script = shrunk(script_of(seed, dear.size(), strategy), less)
            problem = check(script, strategy)
            if problem and dear.rank() == 0:
                print(f"wrong {seed} {strategy}: {problem}", flush=True)
            if problem and "Apart" not in problem and "different parameters" not in problem:
                sys.exit(3)  # ranks that raise are not at the same place
            dear.barrier()
    dear.shutdown()


def shrunk(script: Script, less: Sequence[int]) -> Script:
    """`script` made smaller, one thing after the other: the numbers say which of :func:`smaller`."""
    for number in less:
        script = list(smaller(script))[number]
    return script


def run(
    seeds: Sequence[int], ranks: int, launcher: str, strategies: Sequence[str], less: Sequence[int] = ()
) -> dict[tuple[int, str], str]:
    """What is wrong, by seed and strategy. Whatever ends a job costs its own script; another job goes on behind it."""
    wrong: dict[tuple[int, str], str] = {}
    todo = [(seed, strategy) for seed in seeds for strategy in strategies]
    while todo:
        rest = sorted({seed for seed, _ in todo})
        argv = ["-m", "tests.fuzz", "--worker", "--seeds", ",".join(map(str, rest)), "--strategy", *strategies]
        argv += ["--less", ",".join(map(str, less))] if less else []
        result = run_ranks(ranks, argv, launcher, timeout=job_seconds(len(todo)), env=_ENV, cwd=ROOT)
        found = re.findall(r"^wrong (\d+) (\S+): (.*)$", result.output, re.MULTILINE)
        wrong |= {(int(seed), strategy): text for seed, strategy, text in found}
        if result.returncode == 0 and not result.timed_out:
            break
        begun = [(int(seed), name) for seed, name in re.findall(r"^begins (\d+) (\S+)$", result.output, re.MULTILINE)]
        if not begun:
            raise RuntimeError(result.first_failure())
        wrong.setdefault(begun[-1], _why(result))
        todo = [pair for pair in todo if pair not in begun and pair[0] > begun[-1][0]]
    return wrong


def _why(result: Result) -> str:
    what = "does not end" if result.timed_out else f"ends with {result.returncode}"
    return f"the job {what}\n{result.output[-3000:]}"


def _shrink(seed: int, ranks: int, launcher: str, strategy: str) -> None:
    """Leave out what can be left out, as long as something is wrong."""
    less: list[int] = []
    while True:
        script = shrunk(script_of(seed, ranks, strategy), less)
        for number, _ in enumerate(smaller(script)):
            if run([seed], ranks, launcher, [strategy], [*less, number]):
                less.append(number)
                print(shrunk(script_of(seed, ranks, strategy), less), flush=True)
                break
        else:
            print("smallest:", script, run([seed], ranks, launcher, [strategy], less), sep="\n")
            return


def _seeds(text: str) -> list[int]:
    if ":" in text:
        first, last = map(int, text.split(":"))
        return list(range(first, last))
    return [int(number) for number in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, default=list(range(50)), help="first:last, or numbers with commas")
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", choices=["mpi", "torchrun"], default="mpi")
    parser.add_argument("--shrink", action="store_true", help="leave out of the one seed what makes no difference")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--less", type=_seeds, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.seeds, options.strategy, options.less)
        return 0
    if options.shrink:
        _shrink(options.seeds[0], options.ranks, options.launcher, options.strategy[0])
        return 0
    wrong: dict[tuple[int, str], str] = {}
    for start in range(0, len(options.seeds), _CHUNK):
        chunk = options.seeds[start : start + _CHUNK]
        found = run(chunk, options.ranks, options.launcher, options.strategy)
        for (seed, strategy), text in found.items():
            print(f"\n{script_of(seed, options.ranks, strategy)}\n{strategy}: {text}", flush=True)
        wrong |= found
        done = min(start + _CHUNK, len(options.seeds))
        print(f"{done} of {len(options.seeds)} seeds, {len(wrong)} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
