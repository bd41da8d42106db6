"""Makes a bare machine ready: unpacks what was carried and builds comm_core. Nothing is fetched from a network.

A carried folder may hold wheels (``*.whl``), a libnccl (``libnccl.so.2``, or ``libnccl.so.2.xz``) and ``modules/``:
comm_core's modules, built for that machine's Python.
"""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bench.gpu.running import run

__all__ = [
    "LIBRARY",
    "Places",
    "Ready",
    "Way",
    "build",
    "destination",
    "environment",
    "make_ready",
    "pybind11_of",
    "ready",
    "unpack",
    "ways",
]

LIBRARY = "libnccl.so.2"
_IMPORT_SECONDS = 60.0

#: Runs a command for at most so many seconds; empty, or what went wrong.
Attempt = Callable[[Sequence[str], float], str]


@dataclass(frozen=True)
class Places:
    """The repository, and the folders below `work`: `site` of packages, `prefix` of programs and libraries, `build`."""

    root: Path
    work: Path

    @property
    def site(self) -> Path:
        return self.work / "site"

    @property
    def prefix(self) -> Path:
        return self.work / "prefix"

    @property
    def build(self) -> Path:
        return self.work / "build"


@dataclass(frozen=True)
class Way:
    """One way to have comm_core: `commands` with the seconds each may take, then files for the package's folder."""

    name: str
    commands: tuple[tuple[tuple[str, ...], float], ...] = ()
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Ready:
    """What checks run in, how comm_core came to be there (None: it is not), what failed and why, the carried libnccl."""

    env: dict[str, str]
    way: str | None
    failed: dict[str, str]
    nccl: str | None


def environment(base: Mapping[str, str], places: Places, python: str, has_mpi: bool) -> dict[str, str]:
    """What checks run in (pure): the repository and what was carried come first, what the caller has stays behind them."""

    def before(name: str, *first: Path) -> str:
        return os.pathsep.join([*map(str, first), *filter(None, [base.get(name, "")])])

    made = {
        **base,
        "PYTHONPATH": before("PYTHONPATH", places.root, places.site),
        "PATH": before("PATH", places.prefix / "bin", Path(python).parent),
        "PYTHONUNBUFFERED": "1",
    }
    if has_mpi:
        made |= {"MPIPATH": str(places.prefix), "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", places.prefix / "lib")}
    return made


def destination(member: str, places: Places) -> Path | None:
    """Where a file of a wheel goes (pure); None for one that would leave those folders."""
    parts = PurePosixPath(member).parts
    if not parts or PurePosixPath(member).is_absolute() or ".." in parts:
        return None
    if not parts[0].endswith(".data"):
        return places.site.joinpath(*parts)
    if len(parts) < 3:
        return None
    into = {"data": places.prefix, "scripts": places.prefix / "bin"}.get(parts[1], places.site)
    return into.joinpath(*parts[2:])


def unpack(wheel: Path, places: Places) -> None:
    """As pip would, but also the data of a wheel, which ``pip --target`` leaves out, and with the modes of programs."""
    with zipfile.ZipFile(wheel) as opened:
        for member in opened.infolist():
            path = destination(member.filename, places)
            if path is None or member.is_dir():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(opened.read(member))
            path.chmod((member.external_attr >> 16) & 0o777 | 0o600)


def library(carried: Path, places: Places) -> Path | None:
    """The carried libnccl, unpacked; None where there is none."""
    plain, packed = carried / LIBRARY, carried / f"{LIBRARY}.xz"
    if plain.is_file():
        return plain.resolve()
    if not packed.is_file():
        return None
    whole = places.work / LIBRARY
    with lzma.open(packed) as data, whole.open("wb") as out:
        shutil.copyfileobj(data, out)
    return whole


def build(
    python: str, places: Places, pybind11: str, find: Callable[[str], str | None], mpi: bool, into: Path, seconds: float
) -> tuple[tuple[tuple[str, ...], float], ...]:
    """Commands that build comm_core for that `python` and install its modules in the folder `into` (pure)."""
    cmake, folder = find("cmake") or "cmake", str(places.build)
    configure = [cmake, "-S", str(places.root / "comm_core"), "-B", folder, *(("-G", "Ninja") if find("ninja") else ())]
    configure += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={python}", f"-Dpybind11_DIR={pybind11}"]
    return (
        ((*configure, f"-DCOMM_CORE_MPI={'ON' if mpi else 'OFF'}"), 30),
        ((cmake, "--build", folder, "--parallel", str(os.cpu_count() or 2)), seconds),
        ((cmake, "--install", folder, "--prefix", str(into)), 20),
    )


def ways(
    python: str, places: Places, pybind11: str | None, find: Callable[[str], str | None], modules: Sequence[Path]
) -> list[Way]:
    """Ways to have comm_core, the best first (pure); `pybind11` is its cmake folder, `find` looks for programs.

    Modules are installed beside the sources. The second build reuses what the first one compiled.
    """
    made = []
    if find("cmake") is not None and pybind11 is not None:
        for name, mpi, seconds in (("built", True, 150.0), ("built without MPI", False, 60.0)):
            made.append(Way(name, build(python, places, pybind11, find, mpi, places.root, seconds)))
    if modules:
        made.append(Way("carried", files=tuple(modules)))
    return made


def pybind11_of(python: str, env: Mapping[str, str]) -> str | None:
    """The cmake folder of its pybind11; None where it has none."""
    command = [python, "-m", "pybind11", "--cmakedir"]
    asked = subprocess.run(command, capture_output=True, text=True, env=dict(env), check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None


def make_ready(python: str, root: Path, todo: Sequence[Way], attempt: Attempt) -> tuple[str | None, dict[str, str]]:
    """Take one way after the other until comm_core can be imported. Gives its name, and why those before it failed."""
    imported = (python, "-c", "import comm_core; comm_core.local()")
    if not attempt(imported, _IMPORT_SECONDS):
        return "there already", {}
    failed: dict[str, str] = {}
    for way in todo:
        reason = ""
        for command, seconds in way.commands:
            reason = reason or attempt(command, seconds)
        if not reason:
            for file in way.files:
                shutil.copy2(file, root / "comm_core" / file.name)
            reason = attempt(imported, _IMPORT_SECONDS)
        if not reason:
            return way.name, failed
        failed[way.name] = reason
    return None, failed or {"build": "there is no cmake or no pybind11, and no modules were carried"}


def ready(places: Places, carried: Path | None, log: Path, base: Mapping[str, str], ends: float) -> Ready:
    """Unpack what was carried, and make comm_core importable for the processes that follow, before `ends` (monotonic).

    Nothing raises here: what went wrong is told, and the checks go on with what there is.
    """
    carried = carried or places.work / "nothing"
    failed: dict[str, str] = {}
    nccl = None
    for wheel in sorted(carried.glob("*.whl")):
        try:
            unpack(wheel, places)
        except (OSError, zipfile.BadZipFile) as error:
            failed[wheel.name] = str(error)
    try:
        nccl = library(carried, places)
    except (OSError, EOFError, lzma.LZMAError) as error:
        failed[LIBRARY] = str(error)
    env = environment(base, places, sys.executable, (places.prefix / "bin" / "mpirun").exists())

    def attempt(command: Sequence[str], seconds: float) -> str:
        seconds = min(seconds, ends - time.monotonic())
        return run(command, log, env, places.root, seconds).reason if seconds > 0 else "no time was left"

    modules = sorted(path for path in (carried / "modules").glob("*") if path.is_file())
    todo = ways(
        sys.executable,
        places,
        pybind11_of(sys.executable, env),
        lambda name: shutil.which(name, path=env["PATH"]),
        modules,
    )
    way, reasons = make_ready(sys.executable, places.root, todo, attempt)
    return Ready(env, way, {**failed, **reasons}, None if nccl is None else str(nccl))
