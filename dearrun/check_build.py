"""``dearrun --check-build``: a report of the versions and libraries that were found, before a job fails of one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import comm_core
from comm_core import cuda_kernels, nccl_library
from dearrun import mpirun
from dearrun.errors import LaunchError

__all__ = ["Finding", "render", "report"]

_PROBE_SECONDS = 60
# In a process of its own: initialising MPI may fail, hang or print.
_THREAD_PROBE = """
import ctypes, importlib, comm_core
comm_core.mpi()
level = ctypes.c_int(-1)
ctypes.CDLL(importlib.import_module("comm_core._mpi").__file__).MPI_Query_thread(ctypes.byref(level))
print("level", level.value)
"""
_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is there or not, and where, or why not."""

    there: bool
    name: str
    details: tuple[str, ...] = ()


def render(version: str, sections: Sequence[tuple[str, Sequence[Finding]]]) -> str:
    """The whole report (pure)."""
    lines = [f"dear {version}:"]
    for title, findings in sections:
        lines += ["", f"{title}:"]
        for finding in findings:
            lines.append(f"    [{'X' if finding.there else ' '}] {finding.name}")
            lines += [f"        {detail}" for detail in finding.details]
    return "\n".join(lines) + "\n"


def _torch() -> tuple[Finding, Finding, Finding]:
    """torch, torch.distributed, CUDA."""
    if importlib.util.find_spec("torch") is None:
        missing = ("torch is not installed",)
        return Finding(False, "PyTorch", missing), Finding(False, "torch.distributed", missing), Finding(False, "CUDA")
    import torch
    import torch.distributed as dist

    where = Finding(True, f"PyTorch {torch.__version__}", (str(Path(torch.__file__).parent),))
    has_gloo = dist.is_available() and dist.is_gloo_available()
    gloo = Finding(has_gloo, "torch.distributed with gloo", ("brings the ranks of torchrun together",))
    if torch.version.cuda is None:
        return where, gloo, Finding(False, "CUDA", ("this build of PyTorch is without CUDA",))
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return (
        where,
        gloo,
        Finding(bool(devices), f"CUDA {torch.version.cuda}", tuple(devices) or ("no device is visible",)),
    )


def _nccl() -> Finding:
    """The libnccl that would be used, and the others that are there. After :func:`_torch`, which may load one."""
    others = [f"also there: {other.path} ({other.origin})" for other in nccl_library.candidates()[1:]]
    try:
        used = comm_core.find_nccl()
    except comm_core.Unsupported as error:
        return Finding(False, "NCCL", (str(error), *others))
    name = f"NCCL {used.version_text} (for models on GPUs, one GPU for each rank)"
    return Finding(True, name, (f"{used.path} ({used.origin})", *others))


def _kernels() -> Finding:
    """The CUDA kernels, and for which cards they were compiled."""
    path = cuda_kernels.image_path()
    if path is None:
        return Finding(
            False, "CUDA kernels of comm_core", (cuda_kernels.notes(), "torch's own functions are used instead")
        )
    targets = ", ".join(cuda_kernels.image_targets(path.read_bytes()))
    return Finding(True, f"CUDA kernels of comm_core for {targets}", (str(path), cuda_kernels.notes()))


def _mpirun() -> Finding:
    try:
        path = mpirun.find(os.environ, Path(sys.prefix))
        version = mpirun.version_of(path)
    except LaunchError as error:
        return Finding(False, "mpirun", (str(error),))
    return Finding(
        True, f"mpirun of {mpirun.flavor_of(version).value}", (path, version.strip().splitlines()[0].strip())
    )


def _thread_level() -> str:
    # Open MPI leaves the shared memory of a process that no mpirun started behind, 16 MB each time.
    environ = {"OMPI_MCA_btl": "^sm", **os.environ}
    command = [sys.executable, "-c", _THREAD_PROBE]
    try:
        probe = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False, env=environ
        )
    except subprocess.TimeoutExpired:
        return f"thread level: unknown, MPI did not start within {_PROBE_SECONDS} s"
    words = probe.stdout.split()
    if probe.returncode or words[:1] != ["level"]:
        reason = probe.stderr.strip().splitlines()
        return f"thread level: unknown, MPI does not start: {reason[-1] if reason else probe.returncode}"
    return f"thread level: {_LEVELS[int(words[1])]}"


def _comm_core() -> tuple[Finding, Finding]:
    """The extension, and its MPI backend."""
    info = comm_core.build_info()
    core = Finding(True, f"comm_core for Python {info['python']}", (info["core"],))
    if not comm_core.mpi_available():
        return core, Finding(False, "MPI backend of comm_core", (info["mpi"],))
    library = info["mpi_library"].strip().splitlines()[0].split(",")[0].strip()
    details = (f"built with {info['mpi_compiler']}, MPI standard {info['mpi_standard']}", info["mpi"], _thread_level())
    return core, Finding(True, f"MPI backend of comm_core: {library}", details)


def report() -> str:
    """The report of all findings, each with a mark for whether it is there."""
    torch_found, gloo, cuda = _torch()
    core, mpi = _comm_core()
    tcp = Finding(True, "TCP backend of comm_core", ("for jobs started by torchrun, without MPI",))
    python = Finding(True, f"Python {sys.version.split()[0]}", (sys.executable,))
    sections = [
        ("Python", [python, torch_found, core]),
        ("Launchers and transports", [_mpirun(), mpi, tcp, gloo]),
        ("Accelerators", [cuda, _nccl(), _kernels()]),
    ]
    return render(comm_core.__version__, sections)
