"""Apply each mutation to this checkout, run its test, and take the mutation back; a test that stays green is a failure.

Nothing else may be done in the checkout meanwhile. The tests are run without any mutation first: they have to be green.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from tests import forkserver
from tests.harness import ROOT, command_for
from tests.mutations import tables
from tests.mutations.mutation import Mutation

_SECONDS = 240.0  # a mutation may make a test hang


def _run(mutation: Mutation) -> tuple[bool, str]:
    """Whether the test passes, and what it printed."""
    job = mutation.job()
    options = ["-q", "-x", "-p", "no:cacheprovider", *mutation.arguments()]
    env = dict(os.environ)
    if job is None:
        command = [sys.executable, "-m", "pytest", *options, "--timeout", "120"]
    else:
        launcher, ranks = job
        suite = mutation.test_file().parts[1]
        env = {**env, "DEAR_SPMD_SUITE": suite, "OMP_NUM_THREADS": "1"}
        plugins = ["-p", "tests.spmd_plugin", "-p", "no:logging", "--timeout", "30", "--timeout-method", "thread"]
        command = command_for(launcher, ranks, ["-m", "pytest", *plugins, *options])
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False, "it did not end"
    if process.returncode in (4, 5) or "no tests ran" in output:
        raise SystemExit(f"there is no such test: {mutation.test}\n{output[-2000:]}")
    return process.returncode == 0, output


def _is_caught(mutation: Mutation) -> bool:
    path = ROOT / mutation.file
    before = path.read_text()
    try:
        path.write_text(mutation.applied(before))
        return not _run(mutation)[0]
    finally:
        path.write_text(before)


def _green(mutations: Sequence[Mutation]) -> None:
    """End the program unless each test passes as the code is."""
    for test, mutation in {mutation.test: mutation for mutation in mutations}.items():
        passes, output = _run(mutation)
        if not passes:
            raise SystemExit(f"{test} fails without any mutation:\n{output[-4000:]}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("tables", nargs="*", help=f"some of {', '.join(tables.TABLES)}; all, if none is given")
    parser.add_argument("-k", default="", metavar="WORD", help="those whose promise contains this")
    options = parser.parse_args(argv)
    if unknown := set(options.tables) - set(tables.TABLES):
        parser.error(f"there is no table {', '.join(sorted(unknown))}, but {', '.join(tables.TABLES)}")
    chosen = [
        (name, mutation)
        for name, mutations in tables.TABLES.items()
        for mutation in mutations
        if name in (options.tables or tables.TABLES) and options.k in mutation.promise
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a mutation is taken back then, too
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two versions of a file may be of the same second
    survivors = 0
    with forkserver.listening():
        _green([mutation for _, mutation in chosen])
        for number, (name, mutation) in enumerate(chosen, 1):
            begun = time.monotonic()
            caught = _is_caught(mutation)
            verdict = "caught" if caught else "explained" if mutation.survives else "SURVIVES"
            survivors += verdict == "SURVIVES"
            seconds = time.monotonic() - begun
            print(f"{number:3}/{len(chosen)} {verdict:9} {seconds:4.0f} s  {name}: {mutation.promise}", flush=True)
            if not caught:
                print(f"      {shlex.join(mutation.arguments())}\n      {mutation.survives}".rstrip(), flush=True)
    print(f"{len(chosen)} mutations, {survivors} that no test notices")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
