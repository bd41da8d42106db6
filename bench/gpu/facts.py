"""What a machine has that decides which checks can be run: ``python -m bench.gpu.facts`` prints it as JSON.

A process of its own, because what was installed a moment ago is seen by new ones alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Facts", "look", "missing_gpu"]


@dataclass(frozen=True)
class Facts:
    """`nccl` is the version in use, `nccl_about` where it is, or why there is none; `no_gpu` and `no_mpi` say why."""

    nccl: tuple[int, int, int] | None
    nccl_about: str
    no_mpi: str | None
    no_gpu: str | None
    torch: str
    cuda: str | None


def missing_gpu() -> str | None:
    """Why there is no GPU to check; None where there is one."""
    import torch

    if torch.version.cuda is None:
        return f"no CUDA device: this PyTorch ({torch.__version__}) is without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device: PyTorch sees none; is there a card, its driver, and is CUDA_VISIBLE_DEVICES empty?"
    return None


def look() -> Facts:
    """After comm_core was built."""
    import torch

    import comm_core
    from dearrun import mpirun
    from dearrun.errors import LaunchError

    try:
        library = comm_core.find_nccl()
        nccl, about = library.version, f"{library.version_text} at {library.path}"
    except comm_core.Unsupported as error:
        nccl, about = None, str(error)
    no_mpi = None
    try:
        mpirun.find(os.environ, Path(sys.prefix))
    except LaunchError:
        no_mpi = "no mpirun was found"
    if importlib.util.find_spec("comm_core._mpi") is None:
        no_mpi = "comm_core was built without MPI"
    return Facts(nccl, about, no_mpi, missing_gpu(), torch.__version__, torch.version.cuda)


if __name__ == "__main__":
    print(json.dumps(asdict(look())))
