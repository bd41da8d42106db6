"""Facts about a machine that decide which checks can run: ``python -m bench.gpu.facts`` prints them as JSON.

A process of its own, because what was built a moment ago is seen by new ones alone.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Facts", "look", "missing_gpu"]


@dataclass(frozen=True)
class Facts:
    """`nccl` is the version in use, `nccl_about` where it is. What is missing has its reason there, or in `no_…`."""

    nccl: tuple[int, int, int] | None
    nccl_about: str
    no_core: str | None
    no_mpi: str | None
    no_gpu: str | None
    torch: str
    cuda: str | None

    @staticmethod
    def unknown(reason: str) -> Facts:
        """Of a machine that did not say: every check is tried but that of two ranks, which has to know its NCCL."""
        return Facts(None, reason, None, None, None, "", None)


def missing_gpu() -> str | None:
    """The reason why there is no GPU to check; None where there is one."""
    import torch

    if torch.version.cuda is None:
        return f"no CUDA device: this PyTorch ({torch.__version__}) is without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device: PyTorch sees none; is there a card, its driver, and is CUDA_VISIBLE_DEVICES empty?"
    return None


def look() -> Facts:
    """After comm_core was built, or could not be."""
    import torch

    no_gpu, about = missing_gpu(), (torch.__version__, torch.version.cuda)
    try:
        import comm_core
    except ImportError as error:
        reason = f"comm_core cannot be imported: {error}"
        return Facts(None, reason, reason, reason, no_gpu, *about)
    try:
        library = comm_core.find_nccl()
        nccl, found = library.version, f"{library.version_text} at {library.path}"
    except comm_core.Unsupported as error:
        nccl, found = None, str(error)
    return Facts(nccl, found, None, _missing_mpi(), no_gpu, *about)


def _missing_mpi() -> str | None:
    import comm_core
    from dearrun import mpirun
    from dearrun.errors import LaunchError

    try:
        mpirun.find(os.environ, Path(sys.prefix))
    except LaunchError:
        return "no mpirun was found"
    return None if comm_core.mpi_available() else f"MPI cannot be used: {comm_core.build_info()['mpi']}"


if __name__ == "__main__":
    print(json.dumps(asdict(look())))
