"""The checks that a machine with one GPU is put through, as commands (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Check", "checks"]

_SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
_MODELS = ("resnet50", "bert_base")


@dataclass(frozen=True)
class Check:
    """One command. `skip` says why it is not run on this machine."""

    name: str
    shows: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    skip: str | None = None


def checks(
    python: str, has_mpirun: bool, nccl: tuple[int, int, int] | None, find: Callable[[str], str | None]
) -> list[Check]:
    """All of them in order. `nccl` is the version in use, `find` looks for a tool as ``shutil.which`` does."""
    parity = (python, "-m", "bench.gpu.parity")
    torchrun = (
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "bench.gpu.parity",
    )
    no_mpi = None if has_mpirun else "no mpirun was found"
    enough = nccl is not None and nccl >= (2, 30, 0)
    no_sharing = None if enough else f"two ranks on one GPU need NCCL 2.30, and there is {_dotted(nccl)}"
    mpi = (python, "-m", "dearrun", "-np", "2", *parity)
    tests = (python, "-m", "pytest", "-q", "tests/nccl", "tests/overlap/test_cuda_math.py")
    staged = {"DEAR_CUDA_TRANSPORT": "staged"}
    kernels = (python, "-m", "bench.gpu.kernels")
    sanitizer, ncu = find("compute-sanitizer"), find("ncu")
    made = [
        Check("build", "what was found where", (python, "-m", "dearrun", "--check-build")),
        Check("tests", "tests of the GPU part, over the double", tests),
        Check("kernels", "results and bandwidth of every kernel", (*kernels, "--json", "kernels.json")),
        Check("alone", "parity of every strategy, one rank", (*parity, "--trace", "alone.json")),
        Check("staged-mpi", "parity, two ranks, through pinned memory over MPI", mpi, staged, no_mpi),
        Check("staged-torchrun", "the same over torch.distributed", torchrun, staged),
        Check(
            "nccl",
            "parity, two ranks, over NCCL, and a trace that shows the streams",
            (*torchrun, "--trace", "nccl.json"),
            {"DEAR_CUDA_TRANSPORT": "nccl", **_SHARED},
            no_sharing,
        ),
    ]
    for model in _MODELS:
        for dtype in ("float32", "bfloat16"):
            command = (python, "-m", "bench.gpu.layers", model, "--dtype", dtype, "--json", f"{model}-{dtype}.json")
            made.append(Check(f"layers-{model}-{dtype}", f"times of the layers of {model} in {dtype}", command))
    few = ("--numel", "100003", "--repeat", "2")
    made.append(
        Check(
            "sanitizer",
            "compute-sanitizer without findings",
            (sanitizer or "compute-sanitizer", "--error-exitcode", "1", *kernels, *few),
            skip=None if sanitizer else "compute-sanitizer was not found",
        )
    )
    made.append(
        Check(
            "ncu",
            "what Nsight Compute says about the kernels",
            (ncu or "ncu", "--kernel-name", "regex:cast_|inspect_", "--set", "basic", *kernels, *few),
            skip=None if ncu else "ncu was not found",
        )
    )
    return made


def _dotted(version: tuple[int, int, int] | None) -> str:
    return "none" if version is None else ".".join(map(str, version))
