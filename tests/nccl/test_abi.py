"""Functions and numbers of the CUDA driver and of NCCL are what their headers say, where a machine has these."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpp.build import compiler
from tests.harness import ROOT

_CUDA = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", *map(str, sorted(Path("/usr/local").glob("cuda-*")))]
_PLACES = {
    "cuda": [Path(home, "include") for home in _CUDA if home],
    "nccl": [*(Path(site, "nvidia", "nccl", "include") for site in sys.path), Path("/usr/include")],
}


@pytest.mark.parametrize("what", ["cuda", "nccl"])
def test_what_we_call_is_what_the_header_declares(what: str) -> None:
    found = {
        name: next((place for place in places if (place / f"{name}.h").exists()), None)
        for name, places in _PLACES.items()
    }
    needed = ["cuda"] if what == "cuda" else ["cuda", "nccl"]  # nccl.h includes CUDA's
    missing = [name for name in needed if found[name] is None]
    if missing:
        pytest.skip(f"no {missing[0]}.h on this machine")
    folders = [f"-I{found[name]}" for name in needed] + [f"-I{ROOT / 'comm_core' / 'include'}"]
    command = [compiler(), "-std=c++20", "-fsyntax-only", "-fno-access-control", *folders]
    subprocess.run([*command, str(ROOT / "tests" / "cpp" / "gpu_abi" / f"{what}.cpp")], check=True)
