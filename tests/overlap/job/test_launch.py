"""Who started us: environments as launchers leave them."""

from __future__ import annotations

import pytest

from overlap.job.launch import Launcher, LaunchError, detect, rank_in

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
