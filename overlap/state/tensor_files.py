"""Files of tensors in the format of ``safetensors``, written one tensor after the other, and read range by range.

A file is the length of its header (8 bytes, little-endian), the header (JSON: each tensor's dtype and shape, and where its
bytes begin and end behind the header), and the bytes, row by row, without gaps.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overlap.job.memory.pages import storage_in

__all__ = [
    "INDEX",
    "Described",
    "Place",
    "find",
    "index_of",
    "map_tensor",
    "plan_files",
    "read_range",
    "remove_others",
    "write",
]

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
_SHARDED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_LENGTH = struct.Struct("<Q")
_MOST = 100 * 2**20  # bytes of a header; safetensors refuses longer ones
_ALIGNMENT = 64  # bytes of what follows the header, for those that map the file
_SEGMENT = 32 * 2**20  # bytes that are in memory at a time

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Described(NamedTuple):
    """A tensor that is to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Place(NamedTuple):
    """Where a tensor's bytes are."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


# - Writing


def plan_files(tensors: Mapping[str, Described], most: float) -> dict[str, list[str]]:
    """The names of tensors for each file, whose tensors have at most so many bytes, or are one tensor.

    In the order of `tensors`. Raises ``ValueError`` for dtypes that the format has not.
    """
    for name, one in tensors.items():
        if one.dtype not in _NAMES:
            raise ValueError(f"{name!r} is {one.dtype}, which safetensors files do not have")
    parts: list[list[str]] = []
    size = 0
    for name, one in tensors.items():
        if not parts or (size and size + one.nbytes > most):
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += one.nbytes
    if len(parts) <= 1:
        return {SINGLE: parts[0] if parts else []}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}


def index_of(files: Mapping[str, Iterable[str]], tensors: Mapping[str, Described]) -> str:
    """The text of the index of several files."""
    total = {
        "total_parameters": sum(prod(one.shape) for one in tensors.values()),
        "total_size": sum(one.nbytes for one in tensors.values()),
    }
    where = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": total, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"


def write(
    path: Path, names: Sequence[str], tensors: Mapping[str, Described], value_of: Callable[[str], torch.Tensor]
) -> None:
    """Write a file of tensors. Values, of any dtype, are asked for one by one, and rounded to what is described."""
    order = sorted(names, key=lambda name: -tensors[name].dtype.itemsize)  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        one = tensors[name]
        start, end = end, end + one.nbytes
        header[name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in order:
            one = tensors[name]
            value = value_of(name).detach()
            if value.shape != one.shape:
                raise RuntimeError(f"{name!r} was to have shape {one.shape} and has {tuple(value.shape)}")
            flat = value.cpu().contiguous().view(-1)
            step = max(1, _SEGMENT // one.dtype.itemsize)
            for at in range(0, flat.numel(), step):
                part = flat[at : at + step].to(one.dtype).resolve_conj().resolve_neg()
                file.write(part.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def remove_others(folder: Path, kept: Iterable[str]) -> None:
    """Remove the weights of a model that was saved before, which a reader would take for these."""
    keep = set(kept)
    for path in folder.iterdir():
        if path.name not in keep and (path.name in (SINGLE, INDEX) or _SHARDED.fullmatch(path.name)):
            path.unlink()


# - Reading


def find(path: Path) -> dict[str, Place]:
    """All tensors of a file, or of those in a folder. Raises ``FileNotFoundError``, and ``ValueError`` for other files."""
    if path.is_dir():
        if (path / INDEX).exists() and not (path / SINGLE).exists():
            files = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
            return {name: place for file in files for name, place in _header(path / file).items()}
        path /= SINGLE
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}, nor {INDEX} beside it")
    return _header(path)


def _header(path: Path) -> dict[str, Place]:
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else _MOST + 1
        text = file.read(length) if length <= _MOST else b""
    try:
        header = json.loads(text)
    except ValueError:
        raise ValueError(f"{path} is no file of safetensors") from None
    found = {}
    for name, one in header.items():
        if name == "__metadata__":
            continue
        if one["dtype"] not in _DTYPES:
            raise ValueError(f"{name!r} in {path} has the dtype {one['dtype']}, which is not read here")
        begin = _LENGTH.size + length + one["data_offsets"][0]
        found[name] = Place(path, tuple(one["shape"]), _DTYPES[one["dtype"]], begin)
    return found


def read_range(place: Place, start: int, stop: int, into: torch.Tensor) -> None:
    """Read the elements [start, stop) of a tensor, row by row, into a 1-D tensor, in its dtype."""
    size = place.dtype.itemsize
    step = max(1, _SEGMENT // size)
    with place.file.open("rb") as file:
        file.seek(place.start + start * size)
        for at in range(start, stop, step):
            count = min(step, stop - at)
            memory = bytearray(count * size)
            if file.readinto(memory) != len(memory):
                raise ValueError(f"{place.file} ends before its last tensor does")
            into[at - start : at - start + count].copy_(torch.frombuffer(memory, dtype=place.dtype))


def map_tensor(place: Place, files: dict[Path, mmap.mmap]) -> torch.UntypedStorage | None:
    """The bytes of a tensor in pages of its file: read by the kernel once on each host, and copied by who writes to them.

    The file is never written to. It must not be changed, and may be removed. None where there are no elements, they are
    not aligned to their size, or the file ends before they do. `files` has those that are mapped already.
    """
    there = 0 < place.nbytes <= place.file.stat().st_size - place.start
    if place.start % place.dtype.itemsize or not there:
        return None
    if place.file not in files:
        with place.file.open("rb") as file:
            files[place.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return storage_in(files[place.file], place.start, place.nbytes)
