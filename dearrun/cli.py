"""The program: decide, say what is wrong in one line, and run mpirun, whose signals and exit status are its own."""

from __future__ import annotations

import functools
import os
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from comm_core import __version__
from dearrun import check_build, mpirun, options, reports, transport
from dearrun.addresses import has_address
from dearrun.command import build
from dearrun.errors import LaunchError
from dearrun.hosts import require_addresses, require_shell
from dearrun.supervision import supervise
from overlap.job import settings
from overlap.job.settings import SettingError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """``dearrun``. Exits with 1 and one line on stderr where the job cannot be started."""
    args = options.parser().parse_args(argv)
    if args.version:
        sys.stdout.write(f"{__version__}\n")
        return
    if args.check_build:
        sys.stdout.write(check_build.report())
        return
    try:
        environ = options.environment(args, os.environ)
        settings.read(environ)  # else every worker says it, once all have started
        transport.check(environ)
        program = mpirun.find(environ, Path(sys.prefix))
        flavor = mpirun.flavor_of(mpirun.version_of(program))
        can_reach_others = mpirun.has_remote_shell(environ)
        environ = mpirun.with_defaults(flavor, environ)
        job = options.job(args, environ)
        if not job.mpi_arguments:  # they may say how to reach hosts
            require_shell(job.hosts, socket.gethostname(), can_reach_others)
            if not mpirun.has_agent(os.environ):
                require_addresses(job.hosts, socket.gethostname(), has_address)
            if not job.hosts and job.interfaces is None:
                room = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
                environ = mpirun.on_one_host(flavor, environ, job.workers, room)
        _require_program(job.command[0], environ)
        command = build(program, flavor, job)
    except (LaunchError, SettingError) as error:
        sys.stderr.write(f"dearrun: {error}\n")
        sys.exit(1)
    if args.verbose:
        sys.stderr.write(f"dearrun: {shlex.join(command)}\n")
        sys.stderr.flush()
    obstacle = reports.obstacle(flavor, job)
    if obstacle:
        sys.stderr.write(f"dearrun: mpirun's status alone counts, since workers cannot report their ends: {obstacle}\n")
        sys.stderr.flush()
        mpirun.become(program, command, environ)
    token = secrets.token_hex(8)
    command = build(program, flavor, job, functools.partial(reports.reporting, token=token))
    supervise(program, command, environ, reports.Reports(token, job.workers, tagged=job.tagged))


def _require_program(name: str, environ: dict[str, str]) -> None:
    if shutil.which(name, path=environ.get("PATH")) is None:
        if os.path.isfile(name):
            raise LaunchError(f"{name!r} is not executable, so no worker can run it: chmod +x {name}")
        raise LaunchError(f"{name!r} was not found on this machine's PATH, so no worker can run it")
