"""Our CUDA kernels: which there are, how they are launched, and what was compiled.

Everything but :class:`CudaKernels` is pure or only reads files, and works on machines without a GPU.
"""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comm_core import _C
from comm_core.nccl_connect import VARIABLE

__all__ = [
    "CudaKernels",
    "Geometry",
    "cast_geometry",
    "cast_name",
    "image_path",
    "image_targets",
    "inspect_geometry",
    "inspect_name",
    "notes",
]

# The constants of csrc/cuda/kernels.cu.
_THREADS = 256
_PER_THREAD = 16  # elements that a thread of a cast moves
# An inspection's sum is added up in an order that depends on the count alone, so that every card finds the same.
_INSPECT_PER_BLOCK = 16 * _THREADS
_INSPECT_MAX_BLOCKS = 1024
_MAX_BLOCKS = 2**31 - 1  # of one launch

_NARROW = {_C.DType.FLOAT16: "float16", _C.DType.BFLOAT16: "bfloat16"}
_NAMES = {**_NARROW, _C.DType.FLOAT32: "float32", _C.DType.FLOAT64: "float64"}
#: Bytes of what an inspection leaves: two float64, the sum of squares and the number of values that are not finite.
FOUND_BYTES = 16

_FATBIN_MAGIC = 0xBA55ED50
_KINDS = {1: "compute", 2: "sm"}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Blocks and threads of one launch."""

    blocks: int
    threads: int = _THREADS


def cast_geometry(count: int) -> Geometry:
    """Enough threads for `count` elements. Raises ``comm_core.InvalidUsage`` where there are none, or far too many."""
    _require_some("cast", count)
    blocks = -(-count // (_THREADS * _PER_THREAD))
    if blocks > _MAX_BLOCKS:
        raise _C.InvalidUsage(f"cast: {count} elements need {blocks} blocks, a launch has at most {_MAX_BLOCKS}")
    return Geometry(blocks)


def inspect_geometry(count: int) -> Geometry:
    """Of the pass over `count` elements; one block more adds up what its blocks found."""
    _require_some("inspect", count)
    return Geometry(min(-(-count // _INSPECT_PER_BLOCK), _INSPECT_MAX_BLOCKS))


def cast_name(source: _C.DType, target: _C.DType) -> str | None:
    """The kernel that converts, None where there is none: into 16 bits from fp32, back, and types to themselves."""
    if source not in _NAMES or target not in _NAMES:
        return None
    if source is target or ({source, target} & {_C.DType.FLOAT32} and {source, target} & set(_NARROW)):
        return f"cast_{_NAMES[source]}_{_NAMES[target]}"
    return None


def inspect_name(dtype: _C.DType) -> str | None:
    """The kernel that inspects values of `dtype`."""
    return f"inspect_{_NAMES[dtype]}" if dtype in _NAMES else None


def _require_some(what: str, count: int) -> None:
    if count < 1:
        raise _C.InvalidUsage(f"{what}: {count} elements need no launch")


# - What was compiled


def image_path() -> Path | None:
    """The fat binary; None where comm_core was built without nvcc."""
    path = _folder() / "kernels.fatbin"
    return path if path.exists() else None


def notes() -> str:
    """One line: by which compiler the kernels were made, or why there are none."""
    try:
        return (_folder() / "kernels.txt").read_text().strip()
    except OSError:
        return "not compiled: this comm_core was built before it had kernels"


def image_targets(image: bytes) -> list[str]:
    """For which architectures a fat binary holds code, such as ``sm_90``, or ``compute_80`` for PTX.

    The container is that of CUDA's fatBinaryCtl.h: a header, then entries with headers of their own. Raises
    ``comm_core.InvalidUsage`` for what is none.
    """
    try:
        magic, _, header, size = struct.unpack_from("<IHHQ", image)
        if magic != _FATBIN_MAGIC or header + size != len(image):
            raise _C.InvalidUsage(f"these {len(image)} bytes are no fat binary")
        found, place = [], header
        while place < len(image):
            kind, _, entry, length = struct.unpack_from("<HHIQ", image, place)
            (architecture,) = struct.unpack_from("<I", image, place + 28)
            found.append(f"{_KINDS.get(kind, f'kind{kind}')}_{architecture}")
            place += entry + length
    except struct.error:
        raise _C.InvalidUsage(f"these {len(image)} bytes are no fat binary, or end too early") from None
    return sorted(found)


def _folder() -> Path:
    return Path(str(_backend().__file__)).parent


def _backend() -> Any:
    return importlib.import_module("comm_core._cuda")


# - On a device


class CudaKernels:
    """The kernels on one device; the driver compiles PTX where it has to. Nothing here waits for the device.

    Raises, when it is made:
        comm_core.Unsupported: comm_core was built without kernels, or there is no driver or no such device.
        comm_core.CudaError: the driver or the card cannot use them (a card older than sm_80, a driver too old).
    """

    def __init__(self, device: int) -> None:
        path = image_path()
        if path is None:
            raise _C.Unsupported(f"CUDA kernels were {notes()}")
        self._image = _backend().KernelImage(os.environ.get(VARIABLE) or "libcuda.so.1", device, path.read_bytes())

    def cast(
        self,
        source: int,
        source_type: _C.DType,
        target: int,
        target_type: _C.DType,
        count: int,
        scale: float,
        stream: int,
    ) -> None:
        """`target` = `source` times `scale`, rounded once to the nearest, ties to even; both are addresses.

        16-bit types are multiplied in fp32. `target` may be `source` where the types are the same. Enqueued on `stream`.
        """
        name = cast_name(source_type, target_type)
        if name is None:
            raise _C.Unsupported(f"no kernel converts {source_type.name} to {target_type.name}")
        if not scale > 0:
            raise _C.InvalidUsage(f"cast: scale should be above 0 and is {scale}")
        if count:
            self._launch(name, cast_geometry(count), source, target, count, scale, stream)

    def inspect(self, parts: Sequence[tuple[int, _C.DType, int]], scratch: int, target: int, stream: int) -> None:
        """Sum of squares of all `parts`, and how many values are infinite or NaN: two float64 at `target`.

        A part is an address, a dtype and a count above 0. `scratch` has room for :meth:`scratch_bytes` of the counts.
        Enqueued on `stream`: a launch for each part, and one that adds up what all their blocks found.
        """
        names = [inspect_name(dtype) for _, dtype, _ in parts]
        for name, (_, dtype, _) in zip(names, parts, strict=True):
            if name is None:
                raise _C.Unsupported(f"no kernel inspects {dtype.name}")
        blocks = 0
        for name, (source, _, count) in zip(names, parts, strict=True):
            geometry = inspect_geometry(count)
            self._launch(str(name), geometry, source, scratch + blocks * FOUND_BYTES, count, 1.0, stream)
            blocks += geometry.blocks
        self._launch("inspect_fold", Geometry(1), scratch, target, blocks, 1.0, stream)

    @staticmethod
    def scratch_bytes(counts: Sequence[int]) -> int:
        """What an inspection of parts with so many elements needs beside its result."""
        return sum(inspect_geometry(count).blocks for count in counts) * FOUND_BYTES

    def _launch(
        self, name: str, geometry: Geometry, source: int, target: int, count: int, scale: float, stream: int
    ) -> None:
        self._image.launch(
            name,
            blocks=geometry.blocks,
            threads=geometry.threads,
            source=source,
            target=target,
            count=count,
            scale=scale,
            stream=stream,
        )
