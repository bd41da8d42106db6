"""The one file that comes back: an archive of all results, replaced as a whole after every check."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["clipped", "pack", "with_room"]

_FIRST = "results.json"
_MOST_BYTES = 15 * 2**20  # of an archive; compressed it is smaller
_MOST_OF_LOG = 2**20


def with_room(sizes: Mapping[str, int], most: int) -> list[str]:
    """Names of the files that fit into `most` bytes, the smallest first (pure)."""
    taken, total = [], 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        total += sizes[name]
        if total <= most:
            taken.append(name)
    return taken


def clipped(text: bytes, most: int) -> bytes:
    """`text`, without its middle where it is longer than `most` (pure)."""
    if len(text) <= most:
        return text
    head, tail = most // 4, most - most // 4
    return text[:head] + f"\n… {len(text) - most} bytes are left out …\n".encode() + text[-tail:]


def pack(results: Mapping[str, Any], folder: Path, target: Path, most: int = _MOST_BYTES) -> list[str]:
    """Write `target` anew: results.json, then the files of `folder`. Gives the names of those that had no room.

    Whoever reads `target` meanwhile finds the archive before, whole.
    """
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            found[str(path.relative_to(folder))] = clipped(data, _MOST_OF_LOG) if path.suffix == ".log" else data
    taken = with_room({name: len(data) for name, data in found.items()}, most)
    left_out = sorted(set(found) - set(taken))
    first = json.dumps({**results, "left_out": left_out}, indent=1) + "\n"
    unfinished = target.with_name(f".{target.name}.part")
    with tarfile.open(unfinished, "w:gz") as archive:
        _add(archive, _FIRST, first.encode())
        for name in sorted(taken):
            _add(archive, name, found[name])
    os.replace(unfinished, target)
    return left_out


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size, about.mtime = len(data), int(time.time())
    archive.addfile(about, io.BytesIO(data))
