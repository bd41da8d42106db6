"""The program ``dearrun``: checks the job, says in one line what is wrong with it, or runs mpirun."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from comm_core import __version__
from dearrun import check_build, limits, mpirun, options, reports, transport, worker
from dearrun.addresses import has_address
from dearrun.command import Job, build
from dearrun.errors import LaunchError
from dearrun.hosts import require_addresses, require_room, require_shell
from dearrun.inherited import without_torchrun
from dearrun.interfaces import of_all, remote_shell, require_interfaces
from dearrun.meeting import Meeting
from dearrun.supervision import supervise
from overlap.job import settings
from overlap.job.settings import SettingError

__all__ = ["VENV", "main", "prepare"]

_ERASE_LINE = b"\r\x1b[K"  # a progress bar of rank 0's, which it draws again below
#: The virtual environment, where an mpirun may be installed.
VENV = Path(sys.prefix)


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``dearrun``. Exits with 1 and one line on stderr where the job cannot be started."""
    args = options.parser().parse_args(argv)
    if args.version:
        sys.stdout.write(f"{__version__}\n")
        return
    if args.check_build:
        sys.stdout.write(check_build.report())
        return
    try:
        program, flavor, environ, job = prepare(args, os.environ)
        command = build(program, flavor, job)
    except (LaunchError, SettingError) as error:
        sys.stderr.write(f"dearrun: {error}\n")
        sys.exit(1)
    if args.verbose:
        sys.stderr.write(f"dearrun: {shlex.join(command)}\n")
        sys.stderr.flush()
    meeting = Meeting(job.hosts, socket.gethostname())

    def agent(command: Sequence[str]) -> Sequence[str]:
        return worker.restarting(command, job.restarts) if job.restarts else command

    obstacle = reports.obstacle(flavor, job)
    if obstacle:
        sys.stderr.write(f"dearrun: mpirun's status alone counts, since workers cannot report their ends: {obstacle}\n")
        sys.stderr.flush()
        if not job.several_programs:
            command = build(
                program, flavor, job, lambda command: worker.telling(agent(command), meeting.address, meeting.port)
            )
        meeting.outlast()
        mpirun.become(program, command, environ)
    told_where = any(environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))  # by the user
    watched = job.workers > 1 and reports.is_script(job.command) and not told_where
    token, streams = secrets.token_hex(8), _streams(job)

    def around(command: Sequence[str]) -> list[str]:
        started = worker.telling(worker.starting(agent(command), token, streams), meeting.address, meeting.port)
        return reports.reporting(started, token, watched=watched)

    command = build(program, flavor, job, around)
    on_terminal = streams.err and os.isatty(2) and environ.get("TERM", "dumb") != "dumb"
    found = reports.Reports(token, job.workers, tagged=job.tagged)
    supervise(
        program,
        command,
        environ,
        found,
        meeting if watched else None,
        failure_ends=mpirun.failure_ends(flavor, environ, job.mpi_arguments),
        before_lines=_ERASE_LINE if on_terminal else b"",
    )


class Prepared(NamedTuple):
    """A job that is ready to start: `program`, an mpirun, its environment and what it runs."""

    program: str
    flavor: mpirun.Flavor
    environ: dict[str, str]
    job: Job


def prepare(args: argparse.Namespace, environ: Mapping[str, str]) -> Prepared:
    """Check the job and put together what is started. Starts nothing; raises :class:`LaunchError` or
    :class:`SettingError`.
    """
    told = options.environment(args, without_torchrun(environ))
    settings.read(told)  # else every worker says it, once all have started
    transport.check(told)
    program = mpirun.find(told, VENV)
    flavor = mpirun.flavor_of(mpirun.version_of(program))
    can_reach_others = mpirun.has_remote_shell(told)
    told = mpirun.with_defaults(flavor, told)
    job = options.job(args, told)
    if not job.mpi_arguments:  # they may say how to reach hosts
        here = socket.gethostname()
        require_shell(job.hosts, here, can_reach_others)
        if not mpirun.has_agent(environ):
            require_addresses(job.hosts, here, has_address)
        if job.interfaces is not None:
            shell = remote_shell(environ, job.ssh_port, job.ssh_identity)
            require_interfaces(job.interfaces, of_all(job.hosts, here, shell))
        elif not job.hosts:
            require_room(job.workers, limits.of_processes())
            room = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
            told = mpirun.on_one_host(flavor, told, job.workers, room)
    _require_program(job.command[0], told)
    return Prepared(program, flavor, told, job)


def _streams(job: Job) -> worker.Streams:
    """Where rank 0 writes as it is: to a terminal, or to a pipe if asked to, and into no file."""
    if job.output_folder is not None or job.first_as_is is False:
        return worker.Streams()
    places = [
        f"/proc/{os.getpid()}/fd/{number}" if os.isatty(number) or (job.first_as_is and _is_pipe(number)) else ""
        for number in (1, 2)
    ]
    if not any(places):
        return worker.Streams()
    here = subprocess.run(["sh", "-c", worker.HERE], capture_output=True, text=True, check=False)
    return worker.Streams(here.stdout.strip(), *places)


def _is_pipe(number: int) -> bool:
    return stat.S_ISFIFO(os.fstat(number).st_mode)


def _require_program(name: str, environ: Mapping[str, str]) -> None:
    if shutil.which(name, path=environ.get("PATH")) is None:
        if os.path.isfile(name):
            raise LaunchError(f"{name!r} is not executable, so no worker can run it: chmod +x {name}")
        raise LaunchError(f"{name!r} was not found on this machine's PATH, so no worker can run it: give its path")
