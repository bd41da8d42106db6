"""Which libnccl is chosen, and what is said where there is none. The libraries are stand-ins that only know a version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from comm_core.nccl_library import decode_version, mapped
from tests.cpp.build import compiler


def _stand_in(folder: Path, code: int, status: int = 0) -> Path:
    folder.mkdir(parents=True)
    source, library = folder / "nccl.cpp", folder / "libnccl.so.2"
    source.write_text(f'extern "C" int ncclGetVersion(int* version) {{ *version = {code}; return {status}; }}\n')
    subprocess.run([compiler(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


def _wheel(site: Path, code: int) -> Path:
    info = site / "nvidia_nccl_cu12-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 9.9\n")
    return _stand_in(site / "nvidia" / "nccl" / "lib", code)


def _choose(*, before: str = "", **env: str) -> str:
    """What a process of its own chooses, or why it cannot."""
    text = f"""
import ctypes
import comm_core
from comm_core import nccl_library
nccl_library.ctypes.util.find_library = lambda name: None  # this machine's own does not count
{before}
try:
    found = comm_core.find_nccl()
except comm_core.Unsupported as error:
    print("refused:", error)
else:
    print(found.path, found.origin, found.version_text, sep=" | ")
"""
    environ = {name: value for name, value in os.environ.items() if name != "COMM_CORE_NCCL"}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, env={**environ, **env}, timeout=300
    )
    return done.stdout.strip()


def test_versions_old_and_new() -> None:
    assert [decode_version(code) for code in (22907, 21801, 20900, 2803)] == [
        (2, 29, 7),
        (2, 18, 1),
        (2, 9, 0),
        (2, 8, 3),
    ]


def test_what_a_process_has_loaded() -> None:
    line = "7f00-7f01 r-xp 00000000 08:01 42   "
    maps = [
        f"{line}/usr/lib/libc.so.6",
        f"{line}/a folder/nvidia/nccl/lib/libnccl.so.2",
        f"{line}/a folder/nvidia/nccl/lib/libnccl.so.2",
        f"{line}/opt/libnccl-net.so",
        f"{line}[heap]",
        "",
    ]
    assert mapped("\n".join(maps)) == ["/a folder/nvidia/nccl/lib/libnccl.so.2"]


def test_the_order_of_preference(tmp_path: Path) -> None:
    named, loaded = _stand_in(tmp_path / "named", 23003), _stand_in(tmp_path / "torch", 22907)
    site = tmp_path / "site"
    wheel = _wheel(site, 22703)
    load = f"ctypes.CDLL({str(loaded)!r})"
    paths = {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])}
    everything = _choose(before=load, COMM_CORE_NCCL=str(named), **paths)
    assert everything == f"{named} | the environment variable COMM_CORE_NCCL | 2.30.3"
    assert _choose(before=load, **paths) == f"{loaded} | loaded already, by PyTorch or another package | 2.29.7"
    assert _choose(**paths) == f"{wheel} | the wheel nvidia-nccl-cu12 9.9 | 2.27.3"
    system = f"nccl_library.ctypes.util.find_library = lambda name: {str(loaded)!r}"
    no_wheel = "nccl_library._in_wheels = lambda: iter(())"
    assert _choose(before=f"{system}\n{no_wheel}") == f"{loaded} | the system's | 2.29.7"
    nowhere = _choose(before=no_wheel)
    assert nowhere.startswith("refused: NCCL was not found")
    assert "nvidia-nccl-cu" in nowhere
    assert "COMM_CORE_NCCL" in nowhere


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        (21705, 0, r"is version 2.17.5; at least 2.18.1 is needed"),
        (23003, 5, r"does not say its version: ncclGetVersion returned 5"),
    ],
)
def test_a_library_that_will_not_do_is_named(code: int, status: int, message: str, tmp_path: Path) -> None:
    path = _stand_in(tmp_path / "odd", code, status)
    said = _choose(COMM_CORE_NCCL=str(path))
    assert said.startswith(f"refused: NCCL at {path} (the environment variable COMM_CORE_NCCL) {message}")


def test_what_is_no_library_is_named(tmp_path: Path) -> None:
    nothing = tmp_path / "libnccl.so.2"
    assert f"NCCL at {nothing} (the environment variable COMM_CORE_NCCL) does not load" in _choose(
        COMM_CORE_NCCL=str(nothing)
    )
    assert "does not load" in _choose(COMM_CORE_NCCL="libm.so.6")  # loads, and has no ncclGetVersion
