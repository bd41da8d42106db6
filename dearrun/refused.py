"""horovodrun's flags that dearrun does not have, and what to do instead (pure)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["add_refused"]

_ELASTIC = (
    "no workers are added to those that a job begins with; --restarts N starts those again that fail, and with "
    "dear.elastic a job can be started again with other ones"
)
_TUNING = "give tune=True, or tune=Tuning(...), to DistributedOptimizer"
_ROUTE = "strategies choose how tensors travel; there is nothing to set"

_REASONS = {
    "--gloo": "dearrun starts MPI jobs; for gloo use torchrun --nproc-per-node N train.py, which needs no MPI",
    "--jsrun": "dearrun starts jobs with mpirun only",
    "--start-timeout": "mpirun starts the workers and knows its own limits; put timeout(1) in front of dearrun",
    "--config-file": "write the settings as flags or environment variables",
    "--cycle-time-ms": "nothing waits for the end of a cycle",
    "--cache-capacity": "no names are cached",
    **dict.fromkeys(
        (
            "--hierarchical-allreduce",
            "--hierarchical-allgather",
            "--torus-allreduce",
        ),
        _ROUTE,
    ),
    **dict.fromkeys(
        (
            "--autotune",
            "--autotune-log-file",
            "--autotune-warmup-samples",
            "--autotune-steps-per-sample",
            "--autotune-bayes-opt-max-samples",
            "--autotune-gaussian-process-noise",
        ),
        _TUNING,
    ),
    **dict.fromkeys(
        (
            "--min-np",
            "--min-num-proc",
            "--max-np",
            "--max-num-proc",
            "--slots-per-host",
            "--elastic-timeout",
            "--reset-limit",
            "--blacklist-cooldown-range",
            "--host-discovery-script",
        ),
        _ELASTIC,
    ),
    "--mpi-threads-disable": "communication runs on a thread of its own, beside the script's",
    "--tcp": "tell mpirun, as in --mpi-args='--mca btl tcp,self'",
    "--binding-args": "tell mpirun: --mpi-args='...'",
    "--num-nccl-streams": "a communicator has one stream; there is nothing to set",
    "--thread-affinity": "tell mpirun where workers run: --mpi-args='--bind-to ...'",
    "--gloo-timeout-seconds": "stalled operations are reported, see --stall-check-warning-time-seconds",
    **dict.fromkeys(("--log-without-timestamp", "--log-hide-timestamp"), "configure Python's logging in the script"),
    **dict.fromkeys(
        ("-prefix-timestamp", "--prefix-output-with-timestamp"),
        "tell mpirun: --mpi-args='--timestamp-output', or '--output timestamp' from Open MPI 5 on",
    ),
}


class _Refuse(argparse.Action):
    """Ends the program, with what to do instead, as a wrong flag does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        parser.error(f"dearrun has no {flag}: {_REASONS[self.option_strings[0]]}")


def add_refused(parser: argparse.ArgumentParser) -> None:
    """Make `parser` answer every flag of horovodrun that has no counterpart with the reason."""
    for flag in _REASONS:
        parser.add_argument(flag, action=_Refuse, nargs="?", help=argparse.SUPPRESS)
