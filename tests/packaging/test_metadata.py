"""What an installed package says of itself, and what its signatures show; and the pure parts of building."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from comm_core.build import missing_tools, with_lines
from comm_core.missing import explanation
from tests.harness import ROOT

PACKAGES = (
    "comm_core",
    "overlap",
    "dearrun",
    "dear",
    "wfbp",
    "mgwfbp",
    "bytescheduler_adapter",
    "oss",
    "fsdp",
    "osdp",
    "co2",
    "pipe",
    "model_parallel",
)
STRATEGIES = PACKAGES[3:11]


def _pyproject() -> dict[str, Any]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    found: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text())
    return found


def test_every_package_is_in_the_wheel_and_typed() -> None:
    assert sorted(_pyproject()["tool"]["scikit-build"]["wheel"]["packages"]) == sorted(PACKAGES)
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


@pytest.mark.parametrize("package", ["comm_core", *STRATEGIES])
def test_the_version_is_that_of_the_metadata(package: str) -> None:
    assert importlib.import_module(package).__version__ == metadata.version("dear-pytorch")
    assert _pyproject()["project"]["version"] == metadata.version("dear-pytorch")


def test_extras_are_told() -> None:
    page = (ROOT / "docs" / "install.md").read_text().partition("## Extras")[2]
    told = {name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert told == set(_pyproject()["project"]["optional-dependencies"])


@pytest.mark.parametrize("package", STRATEGIES)
def test_signatures_show_every_option(package: str) -> None:
    """What is left open is typed, too: tests/test_options.py holds its names."""
    parameters = inspect.signature(importlib.import_module(package).DistributedOptimizer).parameters.values()
    opened = {each.name: each.annotation for each in parameters if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    assert opened == ({"others": "Unpack[OwnOptions]"} if package == "dear" else {})
    assert {"elementwise", "per_parameter", "sync_start", "poison"} <= {each.name for each in parameters}


@pytest.mark.parametrize("package", STRATEGIES)
def test_a_misspelt_option_raises_with_the_one_that_is_meant(package: str) -> None:
    make = importlib.import_module(package).DistributedOptimizer
    with pytest.raises(TypeError, match=r"^DistributedOptimizer\(\) has no argument 'poisson'; is 'poison' meant\?$"):
        make(None, poisson=True)
    with pytest.raises(TypeError, match="has no argument 'xyz'; there are optimizer, named_parameters, compression, "):
        make(None, xyz=1)


# - A checkout in which nothing is built


def test_a_checkout_that_is_not_built_names_the_remedies(tmp_path: Path) -> None:
    here, other = tmp_path / "checkout" / "comm_core", tmp_path / "site" / "comm_core"
    (here / "bindings").mkdir(parents=True)
    other.mkdir(parents=True)
    path = [str(here.parent), str(other.parent)]
    said = explanation(here, "3.11", path)
    assert said.startswith(f"comm_core in {here} has no native part for Python 3.11: this is a checkout in which")
    assert "'bash comm_core/compile.sh' builds it into the active environment, 'make setup' into .venv" in said
    assert "another directory" not in said
    (other / "_C.cpython-311-x86_64-linux-gnu.so").touch()
    assert explanation(here, "3.11", path).endswith(f"in another directory, to use the one in {other}")


def test_what_another_python_installed_is_told_as_such(tmp_path: Path) -> None:
    assert explanation(tmp_path, "3.12", []).endswith(
        "it was installed by another Python; install dear-pytorch with this one"
    )


# - Building


def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"PATH": str(tmp_path)}
    assert missing_tools(nothing) == "cmake is missing: pip install cmake"
    (tmp_path / "cmake").write_text("#!/bin/sh\n")
    (tmp_path / "cmake").chmod(0o755)
    assert str(missing_tools(nothing)).startswith("no C++ compiler was found (c++, g++, clang++): install one")
    assert str(missing_tools({**nothing, "CXX": "icpx"})).startswith("no C++ compiler was found (icpx)")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert missing_tools(nothing) == "pybind11 is missing: pip install 'pybind11>=3.0'"
    assert missing_tools({"PATH": ""}) == "cmake and pybind11 are missing: pip install cmake 'pybind11>=3.0'"


def test_a_record_names_each_file_once() -> None:
    record = 'a.py,sha256=x,3\n"with,comma",,\n'
    assert with_lines(record, ["a.py", "with,comma"]) == record
    assert with_lines(record, ["_mpi.so"]) == record + "_mpi.so,,\n"


@pytest.mark.parametrize(
    ("wished", "options"),
    [
        ("8.0+PTX 9.0", ["80,code=sm_80", "80,code=compute_80", "90,code=sm_90"]),
        ("Ampere;12.1a", ["80,code=sm_80", "86,code=sm_86", "86,code=compute_86", "121a,code=sm_121a"]),
        ("sm_80", None),
        ("9", None),
    ],
)
def test_architectures_are_read_as_torch_reads_them(wished: str, options: list[str] | None, tmp_path: Path) -> None:
    script = tmp_path / "script.cmake"
    module = ROOT / "comm_core" / "cmake" / "CudaKernels.cmake"
    script.write_text(f'include({module})\ncomm_core_gencode("{wished}" found)\nmessage("${{found}}")\n')
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent))
    assert cmake is not None, "comm_core was built with one"
    done = subprocess.run([cmake, "-P", str(script)], capture_output=True, text=True)
    if options is None:
        assert done.returncode
        assert f"and holds '{wished}'" in " ".join(done.stderr.split())
    else:
        assert done.stderr.strip().split(";") == [
            part for each in options for part in ("-gencode", f"arch=compute_{each}")
        ]
