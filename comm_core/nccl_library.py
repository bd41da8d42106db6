"""Which libnccl this process uses. It is found when it is needed and never linked: one build serves any machine."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from comm_core import _C

__all__ = ["Candidate", "NcclLibrary", "candidates", "find_nccl"]

#: Names the library to use and wins over every other.
VARIABLE = "COMM_CORE_NCCL"
#: The first release in which communicators can be split.
MINIMUM = (2, 18, 1)
_FILE = "libnccl.so.2"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A libnccl that is there: what dlopen takes, and how we came upon it."""

    path: str
    origin: str


@dataclass(frozen=True, slots=True)
class NcclLibrary:
    """The libnccl in use."""

    path: str
    origin: str
    version: tuple[int, int, int]

    @property
    def version_text(self) -> str:
        """As people write it: 2.29.7."""
        return _dotted(self.version)


def candidates() -> list[Candidate]:
    """Every libnccl that is there, the one to use first; loads none of them.

    The order: the one that ``COMM_CORE_NCCL`` names, the one this process has loaded already (PyTorch does when it is
    imported; a second one beside it would make connections and buffers of its own), that of the wheels
    ``nvidia-nccl-cu*``, the system's.
    """
    named = os.environ.get(VARIABLE)
    found = [Candidate(named, f"the environment variable {VARIABLE}")] if named else []
    found += [Candidate(path, "loaded already, by PyTorch or another package") for path in _mapped_here()]
    found += _in_wheels()
    system = ctypes.util.find_library("nccl")
    if system is not None:
        found.append(Candidate(system, "the system's"))
    distinct: dict[str, Candidate] = {}
    for candidate in found:
        distinct.setdefault(os.path.realpath(candidate.path) if "/" in candidate.path else candidate.path, candidate)
    return list(distinct.values())


def find_nccl() -> NcclLibrary:
    """Load the first of :func:`candidates` and ask for its version. Needs no GPU.

    Raises:
        comm_core.Unsupported: there is none, it does not load, or it is older than 2.18.1. A later candidate is never
            taken instead: ranks that silently used different ones would fail in worse ways.
    """
    found = candidates()
    if not found:
        raise _C.Unsupported(
            "NCCL was not found: this process has loaded no libnccl, no wheel nvidia-nccl-cu* is installed and the system "
            f"has none. Install a PyTorch with CUDA or such a wheel, or let {VARIABLE} name the library"
        )
    chosen = found[0]
    where = f"NCCL at {chosen.path} ({chosen.origin})"
    # Beside another libnccl, whose functions have the same names, it has to prefer its own.
    mode = ctypes.DEFAULT_MODE | (os.RTLD_DEEPBIND if _another_is_loaded(chosen.path) else 0)
    try:
        library = ctypes.CDLL(chosen.path, mode)
        get_version = library.ncclGetVersion
    except (OSError, AttributeError) as error:
        raise _C.Unsupported(f"{where} does not load: {error}") from None
    code = ctypes.c_int(0)
    status = get_version(ctypes.byref(code))
    if status != 0:
        raise _C.Unsupported(f"{where} does not say its version: ncclGetVersion returned {status}")
    version = decode_version(code.value)
    if version < MINIMUM:
        raise _C.Unsupported(
            f"{where} is version {_dotted(version)}; at least {_dotted(MINIMUM)} is needed. Let {VARIABLE} name a newer one"
        )
    return NcclLibrary(chosen.path, chosen.origin, version)


def decode_version(code: int) -> tuple[int, int, int]:
    """What ncclGetVersion says (pure): 22907 is 2.29.7; up to 2.8 it was written 2803."""
    if code < 10000:
        return code // 1000, code // 100 % 10, code % 100
    return code // 10000, code // 100 % 100, code % 100


def mapped(maps: str) -> list[str]:
    """The libnccl files that a process has loaded (pure); `maps` is the text of its /proc/PID/maps."""
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if "libnccl" in line and "/" in line)
    return list(dict.fromkeys(path for path in paths if Path(path).name.startswith("libnccl.so")))


def _mapped_here() -> list[str]:
    try:
        return mapped(Path("/proc/self/maps").read_text())
    except OSError:
        return []


def _another_is_loaded(path: str) -> bool:
    return any(os.path.realpath(other) != os.path.realpath(path) for other in _mapped_here())


def _in_wheels() -> Iterator[Candidate]:
    for package in metadata.distributions():
        name = str(package.metadata["Name"])
        path = Path(str(package.locate_file("nvidia/nccl/lib"))) / _FILE
        if name.startswith("nvidia-nccl-cu") and path.exists():
            yield Candidate(str(path), f"the wheel {name} {package.version}")


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
