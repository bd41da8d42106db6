"""The C++ compiler that comm_core was built with, for programs and libraries that only tests and benchmarks need."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from comm_core import _C
from tests.harness import ROOT

__all__ = ["compile_to", "compiler", "program"]

_MADE = ROOT / "build" / "tests"  # what was compiled before
_KEPT = 30  # of these, the ones used last
_SUFFIXES = {".cpp", ".hpp", ".cu", ".cuh", ".h"}


def compiler() -> str:
    """Its path or name."""
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert found is not None, "comm_core was built, so there should be a C++ compiler"
    return found


def program(folder: Path, source: Path, *more: Path, using: str | None = None) -> Path:
    """`source`, with `more` sources, built in `folder` against the library as it is installed, with $CXXFLAGS.

    `using`: an MPI compiler wrapper in place of the compiler.
    """
    path, library = folder / source.stem, Path(_C.__file__).parent
    include = [f"-I{ROOT / 'comm_core' / part}" for part in ("include", "csrc")]
    link = [f"-L{library}", "-lcomm_core", f"-Wl,-rpath,{library}", "-pthread"]
    flags = ["-std=c++20", "-O0" if using else "-O1", *shlex.split(os.environ.get("CXXFLAGS", ""))]
    compile_to(path, [using or compiler(), *flags, *include, *map(str, (source, *more)), *link])
    return path


def compile_to(path: Path, command: Sequence[str]) -> None:
    """Run ``command -o path``, unless it has compiled the same sources before: then `path` is what it made then.

    The command names sources of this repository alone, and the library that it links against is loaded when it runs.
    """
    _MADE.mkdir(parents=True, exist_ok=True)
    made = _MADE / _digest(command)
    with (_MADE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes that want the same, one compiles it
        if not made.exists():
            unfinished = made.with_suffix(".part")
            environ = {**os.environ, "OMPI_CXX": compiler(), "MPICH_CXX": compiler()}
            subprocess.run([*command, "-o", str(unfinished)], check=True, env=environ)
            unfinished.replace(made)
        made.touch()
        shutil.copy2(made, path)
        for old in sorted(_MADE.iterdir(), key=lambda file: file.stat().st_mtime)[:-_KEPT]:
            old.unlink()


def _digest(command: Sequence[str]) -> str:
    """Of the command, of the compiler and of every file that it may include."""
    digest = hashlib.sha256("\0".join([*command, compiler()]).encode())
    for name in {command[0], compiler()}:
        program = Path(shutil.which(name) or name).resolve()
        digest.update(f"{program} {program.stat().st_size} {program.stat().st_mtime_ns}".encode())
    for folder in (ROOT / "comm_core", ROOT / "tests" / "cpp", ROOT / "bench"):
        for file in sorted(folder.rglob("*")):
            if file.suffix in _SUFFIXES:
                digest.update(str(file).encode() + file.read_bytes())
    return digest.hexdigest()
