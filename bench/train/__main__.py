"""``python -m bench.train``: train on synthetic data with one method, and print the throughput as the last line.

    python -m bench.train --method dear --model resnet50 --small --workers 2
    python -m bench.train --method ddp:bucket_mb=4 --model mlp --emulate-compute mlp@even:640 --workers 2 --network 1gbit

Started by mpirun or torchrun it is one rank of their job; started by hand it starts its workers.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from bench.emulation.cluster import ClusterError
from bench.methods.method import MethodUnavailable
from bench.methods.registry import method
from bench.program import end_in_order
from bench.train import launcher
from bench.train.settings import parse
from overlap.job.launch import LaunchError, detect

__all__ = ["UNAVAILABLE", "main"]

UNAVAILABLE = 3  # the exit code that says: not here, and trying again will not help


def main() -> int:
    argv = sys.argv[1:]
    try:
        ours, size = launcher.LAUNCHED in os.environ, detect(os.environ).size
        settings, outputs = parse(argv, None if ours or size == 1 else size)
        chosen = method(settings.method)
        chosen.look()
        if ours or size > 1:
            if not ours:
                os.environ.update(launcher.for_method(chosen, outputs.timeline))
            from bench.train.trainer import speak, train  # only workers need it

            result = train(settings, chosen, speak, breakdown_wanted=outputs.breakdown, profile=outputs.profile)
            if result is not None and outputs.json is not None:
                about = {**asdict(result), "total": result.total, "plus_minus": result.plus_minus}
                outputs.json.write_text(json.dumps(about, indent=1))
            return 0
        end_in_order()
        command = [*launcher.interpreter_arguments(sys.orig_argv), "-m", "bench.train", *argv]
        launcher.launch(settings, chosen, command, outputs.timeline)
        return 0
    except MethodUnavailable as error:
        sys.stderr.write(f"bench.train: {error}\n")
        return UNAVAILABLE
    except (ValueError, ClusterError, LaunchError, launcher.LauncherError) as error:
        sys.stderr.write(f"bench.train: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
