"""Who started us: environments as launchers leave them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from overlap.job.connecting import connect
from overlap.job.launch import Launcher, LaunchError, detect, no_meeting, rank_in
from overlap.job.settings import SettingError, Settings
from overlap.trace.file import TimelineError, TraceFile

OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ONE = {**OMPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
SRUN = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size"),
    [
        ({}, Launcher.SINGLE, 0, 1),
        (OMPI, Launcher.MPI, 2, 4),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, Launcher.MPI, 1, 2),
        (SRUN, Launcher.MPI, 5, 8),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, Launcher.SINGLE, 0, 1),  # sbatch without srun
        (TORCHRUN, Launcher.TORCHRUN, 1, 3),
        ({**OMPI, **TORCHRUN}, Launcher.MPI, 2, 4),
        ({**ONE, **TORCHRUN}, Launcher.TORCHRUN, 1, 3),
        ({**OMPI, **TORCHRUN, "DEAR_BACKEND": ""}, Launcher.MPI, 2, 4),
        ({**ONE, "RANK": "0", "WORLD_SIZE": "1"}, Launcher.MPI, 0, 1),  # dearrun -np 1
        ({**ONE, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, Launcher.TORCHRUN, 0, 1),
        ({**OMPI, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, Launcher.TORCHRUN, 1, 3),
        ({**SRUN, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, Launcher.TORCHRUN, 1, 3),  # one torchrun for each host
        ({**OMPI, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, Launcher.MPI, 2, 4),
        ({**OMPI, **TORCHRUN, "DEAR_BACKEND": "torch"}, Launcher.TORCHRUN, 1, 3),
        ({**OMPI, "DEAR_BACKEND": "single"}, Launcher.SINGLE, 0, 1),
    ],
)
def test_detect(environ: dict[str, str], launcher: Launcher, rank: int, size: int) -> None:
    launch = detect(environ)
    assert (launch.launcher, launch.rank, launch.size) == (launcher, rank, size)


@pytest.mark.parametrize(
    ("environ", "local_rank", "local_size"),
    [
        (OMPI, 0, 2),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, 1, 2),
        (SRUN, None, None),
        ({**SRUN, "SLURM_LOCALID": "1"}, 1, None),
        (TORCHRUN, 1, 3),
    ],
)
def test_the_place_on_the_host_is_what_the_launcher_says(
    environ: dict[str, str], local_rank: int | None, local_size: int | None
) -> None:
    launch = detect(environ)
    assert (launch.local_rank, launch.local_size) == (local_rank, local_size)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"DEAR_BACKEND": "nccl"}, "nccl"),
        ({"DEAR_BACKEND": "torch"}, "torchrun"),
        ({"HOROVOD_SIZE": "4", "HOROVOD_RANK": "1"}, "horovodrun over gloo.*HOROVOD_SIZE=4.*torchrun"),
        ({"OMPI_COMM_WORLD_SIZE": "two", "OMPI_COMM_WORLD_RANK": "0"}, "'two'"),
    ],
)
def test_nonsense_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}, None),
        ({"MASTER_ADDR": "a"}, "RANK and WORLD_SIZE are set, but not MASTER_PORT: ranks do not know where to meet"),
        ({"MASTER_PORT": ""}, "are set, but not MASTER_ADDR and MASTER_PORT: "),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "http"},
            "MASTER_PORT should hold the number of a port, .* and holds 'http'",
        ),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "up to 65535, and holds '70000'"),
    ],
)
def test_ranks_need_a_place_to_meet(
    environ: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = no_meeting(environ)
    assert (found is None) == (message is None)
    if message is not None:
        monkeypatch.setattr("sys.excepthook", sys.excepthook)  # which is changed
        with pytest.raises(LaunchError, match=message):
            connect(detect({"RANK": "0", "WORLD_SIZE": "2"}), None, Settings())


def test_a_timeline_needs_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before ranks connect: the others would wait for the one that writes it."""
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    launch = detect({"RANK": "0", "WORLD_SIZE": "2"})
    for name in ("run.json", "run-{rank}.json"):
        with pytest.raises(SettingError, match=f"there is no folder {tmp_path}/lost; make it, or name another one"):
            connect(launch, None, Settings(timeline=str(tmp_path / "lost" / name)))
    other = replace(launch, launcher=Launcher.SINGLE, rank=1)
    connect(other, None, Settings(timeline=str(tmp_path / "lost" / "run.json"))).close()  # rank 0 alone writes it
    with pytest.raises(TimelineError, match=f"^the timeline .*: there is no folder {tmp_path}/lost; make it"):
        TraceFile(str(tmp_path / "lost" / "run.json"), 1000)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "DEAR_BACKEND": "nonsense"}, 3),
        ({"WORLD_SIZE": "4", "RANK": "2"}, 2),
        ({"WORLD_SIZE": "4", "RANK": "second"}, 0),
    ],
)
def test_the_rank_is_known_also_where_the_rest_makes_no_sense(environ: dict[str, str], rank: int) -> None:
    assert rank_in(environ) == rank
