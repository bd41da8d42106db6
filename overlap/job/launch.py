"""Reads from the environment how this process was launched (pure: a mapping in, a value out)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

__all__ = [
    "ALONE_VARIABLE",
    "BACKEND_VARIABLE",
    "InitMethod",
    "Launch",
    "LaunchError",
    "Launcher",
    "adopted",
    "by_init_method",
    "detect",
    "no_meeting",
    "rank_in",
]

BACKEND_VARIABLE = "DEAR_BACKEND"
#: Names an open file to a script that dearrun has started: init() writes into it, and so tells that this rank is not alone.
ALONE_VARIABLE = "DEARRUN_ALONE"


class LaunchError(RuntimeError):
    """The job was launched in a way that cannot work: environment and communicator disagree about its size, say."""


class Launcher(Enum):
    """Who started the process; the value is what ``DEAR_BACKEND`` accepts."""

    MPI = "mpi"
    TORCHRUN = "torch"
    SINGLE = "single"


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher says of the job and of this process. ``local_*`` is None where the launcher does not say."""

    launcher: Launcher
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    source: str = "no launcher"
    init_method: str | None = None  # where the script has ranks meet


@dataclass(frozen=True, slots=True)
class InitMethod:
    """Where the ranks of a job meet, as torch.distributed writes it, and which one this process is; None: as launched."""

    url: str
    rank: int | None = None
    world_size: int | None = None


# (size, rank, local rank, local size) as each launcher names them; the first family found wins.
_MPI_FAMILIES = (
    (
        "Open MPI",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MPICH / Intel MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", ""),
)


_TORCHRUN_JOB = "TORCHELASTIC_RUN_ID"
_GLOO_SIZE = "HOROVOD_SIZE"  # set by horovodrun for workers that it starts itself


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name) if name else None
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"environment variable {name} should hold an integer and holds {text!r}; correct or unset it"
        ) from None


def _from_mpi(environ: Mapping[str, str]) -> Launch | None:
    for family, size_name, rank_name, local_rank_name, local_size_name in _MPI_FAMILIES:
        size, rank = _integer(environ, size_name), _integer(environ, rank_name)
        if size is not None and rank is not None:
            local_rank, local_size = _integer(environ, local_rank_name), _integer(environ, local_size_name)
            return Launch(Launcher.MPI, rank, size, local_rank, local_size, f"{family} ({size_name}={size})")
    return None


def _from_torchrun(environ: Mapping[str, str]) -> Launch | None:
    size, rank = _integer(environ, "WORLD_SIZE"), _integer(environ, "RANK")
    if size is None or rank is None:
        return None
    local_rank, local_size = _integer(environ, "LOCAL_RANK"), _integer(environ, "LOCAL_WORLD_SIZE")
    return Launch(Launcher.TORCHRUN, rank, size, local_rank, local_size, f"torchrun (WORLD_SIZE={size})")


def detect(environ: Mapping[str, str]) -> Launch:
    """Detect mpirun, torchrun or a single process from the environment.

    Both families can be present: torchrun, which names its job in every worker, is the inner one where it was started by
    ``srun`` or ``mpirun``, one for each host. Else (dearrun sets RANK for scripts that ask before ``init()``) the one that
    promises more than one process wins, MPI when both do or neither. ``DEAR_BACKEND=mpi|torch|single`` overrides; empty, it
    is not set.

    Raises :class:`LaunchError` for numbers that are none and for a launcher that cannot be followed.
    """
    mpi, torchrun = _from_mpi(environ), _from_torchrun(environ)
    wanted = environ.get(BACKEND_VARIABLE)
    if wanted:
        choices = {
            Launcher.MPI.value: mpi or Launch(Launcher.MPI, source=f"{BACKEND_VARIABLE}=mpi"),
            Launcher.TORCHRUN.value: torchrun,
            Launcher.SINGLE.value: Launch(Launcher.SINGLE, source=f"{BACKEND_VARIABLE}=single"),
        }
        if wanted not in choices:
            raise LaunchError(
                f"{BACKEND_VARIABLE} should be one of {sorted(choices)} and is {wanted!r}; correct or unset it"
            )
        chosen = choices[wanted]
        if chosen is None:
            raise LaunchError(f"{BACKEND_VARIABLE}=torch, but RANK and WORLD_SIZE are not set: start with torchrun")
        return chosen
    if mpi and torchrun:
        inner, several = _TORCHRUN_JOB in environ, torchrun.size > 1
        return torchrun if (inner and several) or (mpi.size == 1 and (inner or several)) else mpi
    if mpi is None and torchrun is None and (_integer(environ, _GLOO_SIZE) or 1) > 1:
        raise LaunchError(
            f"started by horovodrun over gloo ({_GLOO_SIZE}={environ[_GLOO_SIZE]}), whose rendezvous only Horovod "
            "understands: start with dearrun, mpirun, horovodrun --mpi or torchrun"
        )
    return mpi or torchrun or Launch(Launcher.SINGLE)


def adopted(launch: Launch, rank: int, size: int) -> Launch:
    """The launch of a process that is rank `rank` of `size` in an initialised torch.distributed world (pure).

    Raises :class:`LaunchError` where its launcher tells another story.
    """
    if launch.launcher is Launcher.SINGLE:
        forced = launch.source.startswith(BACKEND_VARIABLE)
        source = f"torch.distributed, initialised by the script (world size {size})"
        return launch if forced else Launch(Launcher.TORCHRUN, rank, size, source=source)
    if (launch.rank, launch.size) != (rank, size):
        raise LaunchError(
            f"{launch.source} makes this process rank {launch.rank} of {launch.size}, and the script has initialised "
            f"torch.distributed as rank {rank} of {size}: give init_process_group() the launcher's numbers, or leave it out"
        )
    return launch


def by_init_method(launch: Launch, wanted: InitMethod) -> Launch:
    """The launch of a process that the script tells where to meet (pure).

    Raises :class:`LaunchError` where its launcher tells another story, or nobody says which rank it is.
    """
    if launch.launcher is Launcher.MPI:
        raise LaunchError(
            f"init_method={wanted.url!r}, but this process was {launch.source}, which has brought the ranks together: "
            "leave init_method out"
        )
    alone = launch.launcher is Launcher.SINGLE
    rank = wanted.rank if alone or wanted.rank is not None else launch.rank
    size = wanted.world_size if alone or wanted.world_size is not None else launch.size
    if rank is None or size is None:
        raise LaunchError(f"init_method={wanted.url!r} needs rank= and world_size=, which no launcher has told")
    if not 0 <= rank < size:
        raise LaunchError(f"rank should be from 0 to world_size - 1 = {size - 1} and is {rank}")
    if not alone and (rank, size) != (launch.rank, launch.size):
        raise LaunchError(
            f"{launch.source} makes this process rank {launch.rank} of {launch.size}, and init() rank {rank} of {size}: "
            "leave rank and world_size out"
        )
    source = f"init_method={wanted.url!r}" if alone else launch.source
    return replace(launch, launcher=Launcher.TORCHRUN, rank=rank, size=size, source=source, init_method=wanted.url)


def no_meeting(environ: Mapping[str, str]) -> str | None:
    """The reason why ranks with torchrun's variables cannot meet, if they cannot (pure)."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        return (
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: ranks do not know where to meet. torchrun sets "
            "all of them; by hand, give every process the address of rank 0's host and a free port there"
        )
    port = environ["MASTER_PORT"]
    if not port.isdecimal() or not int(port) < 2**16:
        return (
            f"environment variable MASTER_PORT should hold the number of a port, up to {2**16 - 1}, and holds {port!r}"
        )
    return None


def rank_in(environ: Mapping[str, str]) -> int:
    """This process's rank as its launcher says, even if ``DEAR_BACKEND`` is wrong; 0 in doubt (pure)."""
    try:
        return detect({name: value for name, value in environ.items() if name != BACKEND_VARIABLE}).rank
    except LaunchError:
        return 0
