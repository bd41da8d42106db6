"""The checks of a machine with one GPU, as commands (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bench.gpu.facts import Facts
from bench.gpu.running import GRACE

__all__ = ["Check", "checks", "limit"]

_LEAST_SECONDS = 5  # a check that could not run longer than this is not begun

_SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
_POISON = {"DEAR_POISON": "1"}
_LARGE = str(64 * 2**20)  # elements
_MACHINE = """nvidia-smi; nvcc --version; c++ --version; cmake --version; python3 -m pip list; df -h /dev/shm /tmp; free -g
env | grep -E '^(CUDA|TORCH|NCCL|OMP|OMPI|PYTHON)' || true"""


@dataclass(frozen=True)
class Check:
    """One command, interrupted after `seconds`. `needs` names what it cannot do without: core, card, mpi.

    `skip` says why it is not run on this machine.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ("core", "card")
    skip: str | None = None
    seconds: int = 120


def checks(
    python: str, found: Facts, find: Callable[[str], str | None], nccl: str | None = None, workers: int = 0
) -> list[Check]:
    """All checks, what matters most first.

    `find` looks for a tool as ``shutil.which`` does, `nccl` is a library for the check of that name alone, and `workers`
    run tests side by side where pytest-xdist is there.
    """
    module = (python, "-m")
    missing = {"core": found.no_core, "card": found.no_gpu, "mpi": found.no_mpi}
    made = [
        *_kernels(module, find),
        *_training(module, found, nccl),
        *_steps(module),
        *_layers(module),
        *_suites(module, workers),
    ]
    return [
        replace(check, skip=next((missing[need] for need in check.needs if missing[need]), check.skip))
        for check in made
    ]


def _kernels(module: tuple[str, ...], find: Callable[[str], str | None]) -> list[Check]:
    kernels = (*module, "bench.gpu.kernels")
    odd = ("--numel", "100003", "--repeat", "1")  # no multiple of 512, to which torch rounds sizes up
    sanitizer, ncu = find("compute-sanitizer"), find("ncu")
    # Either of two filters; torch's own kernels would take minutes. Its caching allocator takes memory in large pieces, in
    # which a kernel may go beyond its tensor unseen.
    sanitized = (sanitizer or "compute-sanitizer", "--report-api-errors", "no", "--error-exitcode", "1",
                 "--kernel-name", "kns=cast_", "--kernel-name", "kns=inspect_")  # fmt: skip
    plainly_allocated = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    profiled = ("--clock-control", "none", "--filter-mode", "per-launch-config", "--launch-count", "1",
                "--kernel-name", "regex:cast_|inspect_", "--set", "basic")  # fmt: skip
    return [
        Check("machine", "driver, compilers, packages, room", ("sh", "-c", _MACHINE), needs=(), seconds=20),
        Check("build", "what was found where", (*module, "dearrun", "--check-build"), needs=("core",), seconds=30),
        Check(
            "nccl-one-rank",
            "one rank over NCCL: start, streams, memory, split, end",
            (*module, "bench.gpu.one_rank"),
            seconds=45,
        ),
        Check(
            "kernels",
            "results and bandwidth of every kernel",
            (*kernels, "--json", "kernels.json", "--numel", _LARGE),
            seconds=40,
        ),
        Check(
            "ncu",
            "what Nsight Compute says about one launch of each kernel",
            (ncu or "ncu", *profiled, *kernels, "--numel", _LARGE, "--repeat", "1"),
            skip=None if ncu else "ncu was not found",
            seconds=40,
        ),
        *(
            Check(
                tool,
                f"compute-sanitizer's {tool} has no findings",
                (*sanitized, "--tool", tool, *kernels, *odd),
                plainly_allocated,
                skip=None if sanitizer else "compute-sanitizer was not found",
                seconds=45,
            )
            for tool in ("memcheck", "racecheck")
        ),
    ]


def _training(module: tuple[str, ...], found: Facts, nccl: str | None) -> list[Check]:
    parity = (*module, "bench.gpu.parity")
    torchrun = (*module, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bench.gpu.parity")
    staged = {"DEAR_CUDA_TRANSPORT": "staged", **_POISON}
    enough = found.nccl is not None and found.nccl >= (2, 30, 0)
    return [
        Check(
            "alone",
            "parity of every strategy, one rank, and a trace",
            (*parity, "--trace", "alone.json.gz"),
            _POISON,
            seconds=40,
        ),
        Check(
            "nccl",
            "parity, two ranks, over NCCL, and a trace that shows the streams",
            (*module, "bench.gpu.mps", *torchrun, "--trace", "nccl.json.gz"),
            {"DEAR_CUDA_TRANSPORT": "nccl", **_SHARED, **_POISON, **({} if nccl is None else {"COMM_CORE_NCCL": nccl})},
            skip=None if enough else f"two ranks on one GPU need NCCL 2.30, and there is {_dotted(found.nccl)}",
            seconds=45,
        ),
        Check("staged-torchrun", "parity, two ranks, through pinned memory", torchrun, staged, seconds=40),
        Check(
            "staged-mpi",
            "the same over MPI",
            (*module, "dearrun", "-np", "2", *parity),
            staged,
            ("core", "card", "mpi"),
            seconds=40,
        ),
    ]


def _steps(module: tuple[str, ...]) -> list[Check]:
    return [
        Check(
            f"steps-{model}",
            f"steps of {model} on one rank: alone, dear, wfbp, DDP; and where the host's time goes",
            (
                *module,
                "bench.gpu.steps",
                model,
                "--json",
                f"steps-{model}.json",
                "--trace",
                f"steps-{model}.trace.json.gz",
            ),
            needs=("card",),
            seconds=45,
        )
        for model in ("resnet50", "bert_base", "gpt2")
    ]


def _layers(module: tuple[str, ...]) -> list[Check]:
    return [
        Check(
            f"layers-{model}-{dtype}",
            f"times of the layers of {model} in {dtype}",
            (*module, "bench.gpu.layers", model, "--dtype", dtype, "--json", f"{model}-{dtype}.json"),
            needs=("card",),
            seconds=25,
        )
        for model in ("resnet50", "bert_base")
        for dtype in ("float32", "bfloat16")
    ]


def _suites(module: tuple[str, ...], workers: int) -> list[Check]:
    # -v: who is stopped has told what passed by then.
    pytest = (*module, "pytest", "-v", "--tb", "short", "-p", "no:cacheprovider", "--timeout", "100")
    beside = ("-n", str(workers)) if workers else ()
    on_card = {"DEAR_SPMD_SUITE": "spmd", "DEAR_TEST_DEVICE": "cuda", **_POISON}
    return [
        Check(
            "suite",
            "the suites of every rank on CUDA tensors, one rank",
            (*pytest, *beside, "--maxfail", "40", "tests/spmd"),
            on_card,
            seconds=240,
        ),
        Check(
            "suite-staged",
            "the suites on CUDA tensors, two ranks through pinned memory; the first failure ends it",
            (*module, "dearrun", "-np", "2", *pytest, "-x", "-p", "tests.spmd_plugin", "--timeout-method", "thread",
             "tests/spmd"),
            {**on_card, "DEAR_CUDA_TRANSPORT": "staged"},
            ("core", "card", "mpi"),
            seconds=240,
        ),
    ]  # fmt: skip


def limit(check: Check, left: float) -> float | None:
    """Seconds after which `check` is interrupted where `left` are left for it and its end; None: it is not begun."""
    seconds = min(check.seconds, left - GRACE)
    return None if seconds < _LEAST_SECONDS else seconds


def _dotted(version: tuple[int, int, int] | None) -> str:
    return "none" if version is None else ".".join(map(str, version))
