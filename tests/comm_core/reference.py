"""What the collectives should compute, in numpy; and arrays of every element type, 16-bit brain floats included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import comm_core
from comm_core import DType, ReduceOp

NUMPY = {
    DType.FLOAT16: np.float16,
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
    DType.INT8: np.int8,
    DType.INT16: np.int16,
    DType.INT32: np.int32,
    DType.INT64: np.int64,
    DType.UINT8: np.uint8,
    DType.BOOL: np.bool_,
    DType.BFLOAT16: np.uint16,  # its bits
}
FLOATING = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)


def widen(bits: np.ndarray) -> np.ndarray:
    """Brain floats as fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """fp32 as brain floats, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass
class Array:
    """Elements of one type, as numpy stores them."""

    raw: np.ndarray
    dtype: DType

    def buffer(self) -> object:
        """What comm_core takes: the array itself, or its address where numpy has no such type."""
        if self.dtype is not DType.BFLOAT16:
            return self.raw
        return comm_core.Buffer(self.raw.ctypes.data, self.raw.size, self.dtype, owner=self.raw)


def random_array(dtype: DType, count: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if dtype is DType.BFLOAT16:
        return Array(narrow(rng.standard_normal(count).astype(np.float32)), dtype)
    if dtype is DType.BOOL:
        return Array(rng.integers(0, 2, count).astype(np.bool_), dtype)
    if dtype in FLOATING:
        return Array(rng.standard_normal(count).astype(NUMPY[dtype]), dtype)
    info = np.iinfo(NUMPY[dtype])
    return Array(rng.integers(info.min, info.max, count, dtype=NUMPY[dtype], endpoint=True), dtype)


def zeros(dtype: DType, count: int) -> Array:
    return Array(np.zeros(count, NUMPY[dtype]), dtype)


def reduced(arrays: list[Array], op: ReduceOp) -> np.ndarray:
    """All contributions combined in rank order; 16-bit floats in fp32 and rounded once, as raw elements."""
    dtype = arrays[0].dtype
    values = [a.raw for a in arrays]
    if dtype is DType.BFLOAT16:
        values = [widen(v) for v in values]
    elif dtype is DType.FLOAT16:
        values = [v.astype(np.float32) for v in values]
    result = values[0].copy()
    for value in values[1:]:
        result = _COMBINE[op](result, value) if dtype is not DType.BOOL else _COMBINE_BOOL[op](result, value)
    if op is ReduceOp.AVG:
        result = result * result.dtype.type(1 / result.dtype.type(len(arrays)))
    return narrow(result) if dtype is DType.BFLOAT16 else result.astype(NUMPY[dtype])


with np.errstate(all="ignore"):
    _COMBINE = {
        ReduceOp.SUM: np.add,
        ReduceOp.AVG: np.add,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
        ReduceOp.PROD: np.multiply,
    }
_COMBINE_BOOL = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.MIN: np.logical_and,
    ReduceOp.PROD: np.logical_and,
}


def assert_equal(got: Array, expected: np.ndarray, op: ReduceOp, ranks: int) -> None:
    """Exact where the order of additions cannot show; at three ranks and more, fp32 and fp64 sums may round apart."""
    ordered = got.dtype not in (DType.FLOAT32, DType.FLOAT64) or op in (ReduceOp.MIN, ReduceOp.MAX) or ranks <= 2
    if ordered:
        assert got.raw.tobytes() == expected.tobytes(), (got.raw[:8], expected[:8])
    else:
        tolerance = 1e-5 if got.dtype is DType.FLOAT32 else 1e-13
        np.testing.assert_allclose(got.raw, expected, rtol=tolerance, atol=tolerance)


def balanced(count: int, size: int) -> list[int]:
    return [count // size + (rank < count % size) for rank in range(size)]
