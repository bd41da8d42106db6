"""Removes from an environment what a launcher of this process has set: it is not true of ranks started here (pure)."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["without_launcher", "without_torchrun"]

_TORCHRUN_PREFIX = "TORCHELASTIC_"
_TORCHRUN_JOB = "TORCHELASTIC_RUN_ID"
_TORCHRUN = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
}
_MPI_PREFIXES = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_")
_OTHERS = {"MPI_LOCALNRANKS", "MPI_LOCALRANKID", "DEAR_RANK_PROCESS"}


def without_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """In a worker of torchrun, `environ` without the variables that torchrun has set.

    Else these variables are the user's own, and stay.
    """
    return _without_torchrun(environ) if _TORCHRUN_JOB in environ else dict(environ)


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what any launcher has set, nor a session of dear's."""
    return {
        name: value
        for name, value in _without_torchrun(environ).items()
        if not name.startswith(_MPI_PREFIXES) and name not in _OTHERS
    }


def _without_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_TORCHRUN_PREFIX) and name not in _TORCHRUN
    }
