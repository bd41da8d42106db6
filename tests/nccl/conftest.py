"""The NCCL backend runs over a double of the CUDA driver and of NCCL: these tests need no GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.gpu_double import Double, build


@pytest.fixture(scope="session")
def double() -> Double:
    return Double(build())


@pytest.fixture
def gpu(double: Double) -> Iterator[Double]:
    gc.freeze()  # close() has the garbage collector look, many times: not at all that torch and pytest are made of
    try:
        yield double
        double.close()
    finally:
        gc.unfreeze()
