"""The checks that a machine with one GPU is put through, as commands (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bench.gpu.facts import Facts
from bench.gpu.running import GRACE

__all__ = ["Check", "checks", "limit"]

_LEAST_SECONDS = 5  # a check that could not run longer than this is not begun

_SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
_MODELS = ("resnet50", "bert_base")
_NO_CARD_NEEDED = ("build", "tests")


@dataclass(frozen=True)
class Check:
    """One command, interrupted after `seconds`. `skip` says why it is not run on this machine."""

    name: str
    shows: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    skip: str | None = None
    seconds: int = 120


def checks(
    python: str, found: Facts, find: Callable[[str], str | None], nccl: str | None = None, workers: int = 0
) -> list[Check]:
    """All of them, what matters most first.

    `find` looks for a tool as ``shutil.which`` does, `nccl` is a library for the check of that name alone, and `workers`
    run tests side by side where pytest-xdist is there.
    """
    module = (python, "-m")
    parity = (*module, "bench.gpu.parity")
    torchrun = (*module, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bench.gpu.parity")
    mpi = (*module, "dearrun", "-np", "2")
    staged = {"DEAR_CUDA_TRANSPORT": "staged"}
    kernels = (*module, "bench.gpu.kernels")
    few = ("--numel", "100003", "--repeat", "2")
    pytest = (*module, "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "100")
    beside = ("-n", str(workers)) if workers else ()
    on_card = {"DEAR_SPMD_SUITE": "spmd", "DEAR_TEST_DEVICE": "cuda"}
    sanitizer, ncu = find("compute-sanitizer"), find("ncu")
    enough = found.nccl is not None and found.nccl >= (2, 30, 0)
    no_sharing = None if enough else f"two ranks on one GPU need NCCL 2.30, and there is {_dotted(found.nccl)}"
    made = [
        Check("build", "what was found where", (*module, "dearrun", "--check-build")),
        Check("kernels", "results and bandwidth of every kernel", (*kernels, "--json", "kernels.json")),
        Check("alone", "parity of every strategy, one rank, and a trace", (*parity, "--trace", "alone.json")),
        Check("staged-mpi", "parity, two ranks, through pinned memory over MPI", (*mpi, *parity), staged, found.no_mpi),
        Check("staged-torchrun", "the same over torch.distributed", torchrun, staged),
        Check(
            "nccl",
            "parity, two ranks, over NCCL, and a trace that shows the streams",
            (*torchrun, "--trace", "nccl.json"),
            {"DEAR_CUDA_TRANSPORT": "nccl", **_SHARED, **({} if nccl is None else {"COMM_CORE_NCCL": nccl})},
            no_sharing,
        ),
        Check(
            "suite",
            "the suites of every rank on CUDA tensors, one rank",
            (*pytest, *beside, "tests/spmd"),
            on_card,
            seconds=240,
        ),
    ]
    for model in _MODELS:
        for dtype in ("float32", "bfloat16"):
            command = (*module, "bench.gpu.layers", model, "--dtype", dtype, "--json", f"{model}-{dtype}.json")
            made.append(Check(f"layers-{model}-{dtype}", f"times of the layers of {model} in {dtype}", command))
    made += [
        Check(
            "sanitizer",
            "compute-sanitizer without findings",
            (sanitizer or "compute-sanitizer", "--error-exitcode", "1", *kernels, *few),
            skip=None if sanitizer else "compute-sanitizer was not found",
        ),
        Check(
            "ncu",
            "what Nsight Compute says about the kernels",
            (ncu or "ncu", "--clock-control", "none", "--kernel-name", "regex:cast_|inspect_", "--set", "basic",
             *kernels, *few),
            skip=None if ncu else "ncu was not found",
        ),
        Check(
            "suite-staged",
            "the suites on CUDA tensors, two ranks through pinned memory; the first failure ends it",
            (*mpi, *pytest, "-x", "-p", "tests.spmd_plugin", "--timeout-method", "thread", "tests/spmd"),
            {**on_card, **staged},
            found.no_mpi,
            seconds=240,
        ),
        Check("tests", "tests of the GPU part, over doubles",
              (*pytest, *beside, "tests/nccl",
               "tests/overlap/transport/test_cuda_math.py", "tests/overlap/transport/test_cuda_streams.py")),
    ]  # fmt: skip
    if found.no_gpu is None:
        return made
    return [check if check.name in _NO_CARD_NEEDED else replace(check, skip=found.no_gpu) for check in made]


def limit(check: Check, left: float) -> float | None:
    """Seconds after which `check` is interrupted where `left` are left for it and its end; None: it is not begun."""
    seconds = min(check.seconds, left - GRACE)
    return None if seconds < _LEAST_SECONDS else seconds


def _dotted(version: tuple[int, int, int] | None) -> str:
    return "none" if version is None else ".".join(map(str, version))
