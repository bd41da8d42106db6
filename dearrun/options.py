"""dearrun's command line: its flags, named as horovodrun's, and what they mean to the workers."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dearrun.command import Job
from dearrun.errors import LaunchError
from dearrun.hosts import Host, parse_hostfile, parse_hosts, require_slots
from dearrun.refused import add_refused
from overlap.job.settings import LOG_LEVELS

__all__ = ["environment", "job", "parser"]

# Handed to all workers on all hosts, beside what -x names.
_PASSED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")
_PASSED_PREFIXES = ("DEAR_", "HOROVOD_", "BYTESCHEDULER_")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
# Flags of horovodrun that ask for what dearrun does anyway.
_ALWAYS = {
    "--mpi": "use MPI",
    "--disable-cache": "check everything anew",
    "--no-autotune": "tune only where the script says tune=True",
    "--no-hierarchical-allreduce": "no hierarchy of all-reduces",
    "--no-hierarchical-allgather": "no hierarchy of all-gathers",
    "--no-torus-allreduce": "no torus of all-reduces",
    "--no-mpi-threads-disable": "MPI with threads",
    "--log-with-timestamp": "lines of the log begin with the time",
    "--no-log-hide-timestamp": "lines of the log begin with the time",
}


class _Parser(argparse.ArgumentParser):
    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's, which does not say which flag is meant by one that there is not."""
        found, strangers = self.parse_known_args(args, namespace)
        if strangers:
            flag = strangers[0].partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            self.error(
                f"dearrun has no {flag}; " + (f"is {near[0]} meant?" if near else "dearrun --help has all flags")
            )
        return found


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="dearrun",
        usage="dearrun -np N [-H host1:2,host2:2] [options] command ...",
        description="Start a training job with the machine's mpirun. Without hosts, all workers run on this machine, also "
        "more than it has cores.",
    )
    made.add_argument("-v", "--version", action="store_true", help="print the version")
    made.add_argument("-cb", "--check-build", action="store_true", help="print what was found where, and end")
    made.add_argument("-np", "--num-proc", type=_positive, metavar="N", help="workers; default: all slots of the hosts")
    hosts = made.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="H", help="hosts and their slots: host1:2,host2:2")
    hosts.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the same, one 'host slots=2' a line")
    made.add_argument(
        "-x", "--env", action="append", default=[], metavar="NAME[=VALUE]", help="hand a variable to workers"
    )
    made.add_argument("-p", "--ssh-port", type=_positive, help="ssh's port on the hosts")
    made.add_argument("-i", "--ssh-identity-file", help="ssh's private key")
    made.add_argument(
        "--network-interfaces",
        "--network-interface",
        action="append",
        metavar="IF",
        help="for MPI's TCP traffic: eth0,eth1, or one at a time",
    )
    made.add_argument("--mpi-args", default="", metavar="ARGS", help="further flags for mpirun, in one argument")
    made.add_argument("--verbose", action="store_true", help="print mpirun's command line first")
    made.add_argument(
        "--output-filename", metavar="DIR", help="write DIR/rank.N/stdout and stderr instead of the terminal"
    )
    tags = made.add_mutually_exclusive_group()
    tags.add_argument(
        "--tag-output",
        choices=("all", "others"),
        help="whose lines begin with the rank: all, or all but those of rank 0 (others, which is so on a terminal)",
    )
    tags.add_argument("--no-tag-output", action="store_true", help="do not put the rank in front of every line")
    made.add_argument(
        "--restarts",
        type=_positive,
        metavar="N",
        help="start a worker that fails again, up to N times; others go on (co2.keep_going), or are started again, too",
    )
    made.add_argument("--log-level", type=str.lower, choices=sorted(LOG_LEVELS, key=LOG_LEVELS.__getitem__))
    made.add_argument(
        "--fusion-threshold-mb", type=_megabytes, metavar="MB", help="how much dear and oss fuse, or auto (auto)"
    )
    made.add_argument("--timeline-filename", metavar="FILE", help="record a timeline; {rank} in FILE: one per rank")
    _add_switch(made, "timeline-mark-cycles", "mark optimizer steps in the timeline")
    _add_switch(made, "stall-check", "report and end stalled operations")
    made.add_argument("--stall-check-warning-time-seconds", type=_seconds, metavar="S", help="report after S (60)")
    made.add_argument(
        "--stall-check-shutdown-time-seconds", type=_seconds, metavar="S", help="end the job after S (600)"
    )
    for flag, what in _ALWAYS.items():
        made.add_argument(flag, action="store_true", help=f"{what}, which is always so")
    add_refused(made)
    made.add_argument("command", nargs=argparse.REMAINDER, help="what every worker runs: python train.py ...")
    return made


def _add_switch(made: argparse.ArgumentParser, name: str, what: str) -> None:
    """``--name`` and ``--no-name``; None where neither is given: then a variable of the environment counts."""
    made.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=what)


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"should be a whole number of at least 1 and is {text}")
    return int(text)


def _at_least_0(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


def _seconds(text: str) -> float:
    if not _at_least_0(text):
        raise argparse.ArgumentTypeError(f"should be a number of at least 0 and is {text}")
    return float(text)


def _megabytes(text: str) -> str:
    if text != "auto" and not _at_least_0(text):
        raise argparse.ArgumentTypeError(f"should be a number of at least 0, or auto, and is {text}")
    return text


def environment(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with what the flags say (pure). Raises :class:`LaunchError` for a ``-x`` that names nothing."""
    made = dict(environ)
    for item in args.env:
        name, given, value = item.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise LaunchError(f"-x {item}: {name!r} is no name of a variable; write -x NAME or -x NAME=VALUE")
        if given:
            made[name] = value
        elif name not in environ:
            raise LaunchError(f"-x {name}: the variable is not set here; write -x {name}=VALUE, or leave it out")
    if args.restarts is not None:
        made["DEAR_KEEP_GOING"] = "1"
    if args.log_level is not None:
        made["DEAR_LOG_LEVEL"] = args.log_level
    if args.fusion_threshold_mb is not None:
        made["DEAR_THRESHOLD_MB"] = args.fusion_threshold_mb
    if args.timeline_filename is not None:
        made["DEAR_TIMELINE"] = args.timeline_filename
    if args.timeline_mark_cycles is not None:
        made["DEAR_TIMELINE_MARK_CYCLES"] = str(int(args.timeline_mark_cycles))
    if args.stall_check is True:  # as ever, also where the caller's environment says otherwise
        made["HOROVOD_STALL_CHECK_DISABLE"] = "0"
    if args.stall_check is False:
        made["DEAR_STALL_WARN_SECONDS"] = made["DEAR_STALL_ABORT_SECONDS"] = "0"
    if args.stall_check_warning_time_seconds is not None:
        made["DEAR_STALL_WARN_SECONDS"] = str(args.stall_check_warning_time_seconds)
    if args.stall_check_shutdown_time_seconds is not None:
        made["DEAR_STALL_ABORT_SECONDS"] = str(args.stall_check_shutdown_time_seconds)
    return made


def _hosts(args: argparse.Namespace) -> list[Host]:
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if args.hostfile is None:
        return []
    try:
        text = Path(args.hostfile).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the hostfile cannot be read: {error}") from error
    return parse_hostfile(text, args.hostfile)


def job(args: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """The job that the arguments describe, given the workers' environment.

    Raises :class:`LaunchError` for what does not fit together.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise LaunchError("there is no command to run: dearrun -np 4 python train.py")
    if command[0].endswith(".py") and not os.access(command[0], os.X_OK):
        raise LaunchError(f"{command[0]} is a script, not a command: dearrun -np 4 python {command[0]}")
    hosts = _hosts(args)
    if args.num_proc is None and not hosts:
        raise LaunchError("how many workers? give -np N, or hosts with -H or -hostfile")
    workers = args.num_proc if args.num_proc is not None else sum(host.slots for host in hosts)
    if hosts:
        require_slots(hosts, workers)
    if args.restarts is not None and ":" in command:
        raise LaunchError("--restarts is for one program, and the command starts several")
    named = [item.partition("=")[0] for item in args.env]
    found = [name for name in environ if name in _PASSED or name.startswith(_PASSED_PREFIXES)]
    return Job(
        workers=workers,
        command=tuple(command),
        hosts=tuple(hosts),
        passed=tuple(sorted({*named, *found})),
        tagged=not args.no_tag_output,
        first_as_is=None if args.tag_output is None else args.tag_output == "others",
        output_folder=args.output_filename,
        restarts=args.restarts or 0,
        interfaces=None if args.network_interfaces is None else ",".join(args.network_interfaces),
        ssh_port=args.ssh_port,
        ssh_identity=args.ssh_identity_file,
        mpi_arguments=_words(args.mpi_args),
    )


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(f"--mpi-args {text!r} cannot be taken apart: {error}; quote it as in a shell") from error
