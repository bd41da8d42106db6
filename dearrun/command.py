"""Builds mpirun's command line from what the user wants, for each kind of mpirun (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dearrun.errors import LaunchError
from dearrun.hosts import Host
from dearrun.mpirun import Flavor

__all__ = ["Job", "build", "into_files"]

# Every rank writes files of its own; the number of the rank is where its launcher puts it.
_INTO_FILES = (
    'd="$0/rank.${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$RANK}}"; mkdir -p "$d" && exec "$@" >"$d/stdout" 2>"$d/stderr"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The command to run, on how many workers and where.

    `hosts` is empty for this machine alone; `passed` are names of variables for all workers.
    """

    workers: int
    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    passed: tuple[str, ...] = ()
    tagged: bool = True
    first_as_is: bool | None = None  # rank 0's lines are not tagged; None: where a terminal shows them
    output_folder: str | None = None
    restarts: int = 0  # of each worker that fails, while the others go on
    interfaces: str | None = None
    ssh_port: int | None = None
    ssh_identity: str | None = None
    mpi_arguments: tuple[str, ...] = ()

    @property
    def several_programs(self) -> bool:
        """Whether the command starts several programs, as in ``a : -np 2 b``."""
        return ":" in self.command


def build(mpirun: str, flavor: Flavor, job: Job, around: Callable[[Sequence[str]], Sequence[str]] = tuple) -> list[str]:
    """The whole command line. Raises :class:`LaunchError` for what this kind of mpirun cannot do.

    `around` makes of the workers' command what mpirun is to start in its stead.
    """
    command = list(job.command)
    if job.output_folder is not None:
        command = into_files(command, job.output_folder)
    return [mpirun, "-np", str(job.workers), *_OPTIONS[flavor](job), *job.mpi_arguments, *around(command)]


def into_files(command: Sequence[str], folder: str) -> list[str]:
    """The `command`, with its output in files of each rank's own below `folder`; works under torchrun, too."""
    return ["sh", "-c", _INTO_FILES, folder, *command]


def _ssh_arguments(job: Job) -> str:
    port = ["-p", str(job.ssh_port)] if job.ssh_port is not None else []
    identity = ["-i", job.ssh_identity] if job.ssh_identity is not None else []
    return " ".join([*port, *identity])


def _open_mpi(job: Job, tag: Sequence[str], interfaces: Sequence[str], ssh: Sequence[str]) -> list[str]:
    options: list[str] = []
    if job.hosts:
        options += ["--host", ",".join(str(host) for host in job.hosts)]
    if job.tagged and job.output_folder is None:
        options += tag
    if job.interfaces is not None:
        options += ["--mca", "btl_tcp_if_include", job.interfaces, *interfaces, job.interfaces]
    arguments = _ssh_arguments(job)
    if arguments:
        options += [*ssh, arguments]
    for name in job.passed:
        options += ["-x", name]
    return options


def _open_mpi_4(job: Job) -> list[str]:
    return _open_mpi(job, ["--tag-output"], ["--mca", "oob_tcp_if_include"], ["--mca", "plm_rsh_args"])


def _open_mpi_5(job: Job) -> list[str]:
    return _open_mpi(job, ["--output", "tag"], ["--prtemca", "prte_if_include"], ["--prtemca", "plm_ssh_args"])


def _mpich(job: Job) -> list[str]:
    options: list[str] = []
    if job.hosts:
        options += ["-hosts", ",".join(str(host) for host in job.hosts)]
    if job.tagged and job.output_folder is None:
        options += ["-prepend-rank"]
    if job.interfaces is not None:
        if "," in job.interfaces:
            raise LaunchError(
                f"this mpirun (MPICH) takes one interface, and --network-interfaces names {job.interfaces}"
            )
        options += ["-iface", job.interfaces]
    if _ssh_arguments(job):
        raise LaunchError("this mpirun (MPICH) takes no arguments for ssh: put port and identity into ~/.ssh/config")
    return options  # it passes the whole environment by itself


def _other(job: Job) -> list[str]:
    asked = {
        "-H": job.hosts,
        "--network-interfaces": job.interfaces,
        "-p, -i": _ssh_arguments(job),
    }
    refused = [flag for flag, value in asked.items() if value]
    if refused:
        raise LaunchError(
            f"this mpirun is neither Open MPI nor MPICH, so dearrun does not know its flags for {', '.join(refused)}: "
            "give them with --mpi-args"
        )
    return []


_OPTIONS: dict[Flavor, Callable[[Job], list[str]]] = {
    Flavor.OPEN_MPI_4: _open_mpi_4,
    Flavor.OPEN_MPI_5: _open_mpi_5,
    Flavor.MPICH: _mpich,
    Flavor.OTHER: _other,
}
