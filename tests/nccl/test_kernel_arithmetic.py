"""What the kernels compute: their own source, compiled as C++ and run by tests/cpp/cuda_emulator, against torch."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comm_core import DType, cuda_kernels
from comm_core.cuda_kernels import CudaKernels, cast_name
from overlap.transport.cuda.math import cast_scale
from tests.cpp.build import compile_to, compiler
from tests.harness import ROOT

TYPES = {
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
}
GUARD = 64.0


class _Emulated:
    """`comm_core._cuda`, with the CPU for a device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def KernelImage(self, cuda: str, device: int, image: bytes) -> Any:
        return self

    def launch(self, name: str, *, blocks: int, threads: int, source: int, target: int, count: int, scale: float,
               stream: int) -> None:  # fmt: skip
        self._library.emulate(
            self._library[name], blocks, threads, ctypes.c_void_p(source), ctypes.c_void_p(target),
            ctypes.c_ulonglong(count), ctypes.c_double(scale),
        )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = ROOT / "tests" / "cpp" / "cuda_emulator"
    path = tmp_path_factory.mktemp("emulator") / "libemulator.so"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-sign-compare"]
    command = [compiler(), "-std=c++20", "-O1", "-fno-strict-aliasing", *warnings, "-shared", "-fPIC", f"-I{folder}"]
    compile_to(path, [*command, str(folder / "emulator.cpp")])
    return ctypes.CDLL(str(path))


@pytest.fixture
def kernels(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CudaKernels:
    image = tmp_path / "kernels.fatbin"
    image.write_bytes(b"")
    monkeypatch.setattr(cuda_kernels, "image_path", lambda: image)
    monkeypatch.setattr(cuda_kernels, "_backend", lambda: _Emulated(library))
    return CudaKernels(0)


def _values(numel: int) -> torch.Tensor:
    """All sizes, with ties, subnormal values and what is not finite among them."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(
        -9, 6, (numel,), generator=generator
    )
    odd = [
        float("inf"),
        float("nan"),
        -0.0,
        1e-42,
        -1e-42,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        1 + 2.0**-11,
        65519.0,
        65520.0,
    ]
    odd += [-float("inf"), 3e38, 2.0**-24, 2.0**-25, 3 * 2.0**-26, 0.0]
    values[: min(len(odd), numel)] = torch.tensor(odd, dtype=torch.float64)[:numel]
    return values


@pytest.mark.parametrize(("source", "target"), [p for p in itertools.product(TYPES, TYPES) if cast_name(*p)])
def test_every_cast_is_torchs_bit_by_bit(kernels: CudaKernels, source: DType, target: DType) -> None:
    # Blocks of 4096 that are full and one that is not; addresses that allow wide loads and such that do not.
    for numel, (start, to), scale in itertools.product((3, 4096, 9001), ((0, 0), (1, 0), (4, 3)), (1.0, 0.3)):
        given = _values(start + numel).to(TYPES[source])[start:]
        memory = torch.full((to + numel + 8,), GUARD, dtype=TYPES[target])
        found, expected = memory[to : to + numel], torch.empty(numel, dtype=TYPES[target])
        kernels.cast(given.data_ptr(), source, found.data_ptr(), target, numel, scale, 0)
        cast_scale([expected], [given], scale)
        same = (found == expected) & (torch.signbit(found) == torch.signbit(expected))
        assert bool((same | (found.isnan() & expected.isnan())).all()), (numel, start, to, scale)
        assert bool((memory[:to] == GUARD).all())
        assert bool((memory[to + numel :] == GUARD).all()), "nothing is written behind the end"


def test_a_cast_may_be_in_place(kernels: CudaKernels) -> None:
    values = torch.arange(5000.0)
    kernels.cast(values.data_ptr(), DType.FLOAT32, values.data_ptr(), DType.FLOAT32, 5000, 0.5, 0)
    assert torch.equal(values, torch.arange(5000.0) * 0.5)


def _inspected(kernels: CudaKernels, parts: list[tuple[torch.Tensor, DType]]) -> list[float]:
    counts = [tensor.numel() for tensor, _ in parts]
    scratch, found = np.full(kernels.scratch_bytes(counts) // 8 + 1, GUARD), np.zeros(2)
    kernels.inspect(
        [(tensor.data_ptr(), dtype, tensor.numel()) for tensor, dtype in parts],
        scratch.ctypes.data, found.ctypes.data, 0,
    )  # fmt: skip
    assert scratch[-1] == GUARD
    return [float(value) for value in found]


@pytest.mark.parametrize("most_blocks", [1, 1024])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_inspection_sees_each_value_once(
    kernels: CudaKernels, dtype: DType, most_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_kernels, "_INSPECT_MAX_BLOCKS", most_blocks)  # one block goes over all of it many times
    for numel, start in itertools.product((7, 17001), (0, 1)):
        tensor = torch.randint(-7, 8, (start + numel,), dtype=torch.int64).to(TYPES[dtype])[start:]
        expected = float(tensor.double().square().sum())  # of whole numbers, so exact in any order
        assert _inspected(kernels, [(tensor, dtype)]) == [expected, 0.0], (numel, start)
    tensor[[0, 5000, 17000]] = torch.tensor([float("inf"), float("nan"), -float("inf")]).to(TYPES[dtype])
    assert _inspected(kernels, [(tensor, dtype)])[1] == 3.0


def test_parts_of_several_types_add_up(kernels: CudaKernels) -> None:
    parts = [
        (torch.full((n,), 2.0, dtype=TYPES[dtype]), dtype) for n, dtype in zip((4097, 3, 9000), TYPES, strict=False)
    ]
    assert _inspected(kernels, parts) == [4.0 * (4097 + 3 + 9000), 0.0]
    assert _inspected(kernels, [(torch.full((3,), 3e38), DType.FLOAT32)])[0] == pytest.approx(2.7e77, rel=1e-6)
