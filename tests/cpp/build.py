"""The C++ compiler that comm_core was built with, for programs and libraries that only tests and benchmarks need."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from comm_core import _C
from tests.harness import ROOT

__all__ = ["compiler", "program"]


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
    command = [using or compiler(), *flags, *include, *map(str, (source, *more)), *link, "-o", str(path)]
    subprocess.run(command, check=True, env={**os.environ, "OMPI_CXX": compiler(), "MPICH_CXX": compiler()})
    return path
