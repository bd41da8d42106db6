"""What is launched, and what was compiled."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import comm_core
from comm_core import DType, cuda_kernels
from comm_core.cuda_kernels import (
    CudaKernels,
    Geometry,
    cast_geometry,
    cast_name,
    image_path,
    image_targets,
    inspect_geometry,
    notes,
)
from overlap.transport.cuda.math import kernels_on
from tests.gpu_double import Double
from tests.harness import ROOT

# A thread of a cast loads 4 elements at once, one of an inspection 16 bytes.
WIDE_LOADS = {
    ("cast", "float32"): "ld.global.v4.f32",
    ("cast", "float64"): "ld.global.v2.f64",
    ("cast", "float16"): "ld.global.v4.u16",
    ("cast", "bfloat16"): "ld.global.v4.u16",
    ("inspect", "float32"): "ld.global.v4.f32",
    ("inspect", "float64"): "ld.global.v2.f64",
    ("inspect", "float16"): "ld.global.v4.u32",
    ("inspect", "bfloat16"): "ld.global.v4.u32",
}
NVCC = shutil.which("nvcc") or next((path for path in ("/usr/local/cuda/bin/nvcc",) if os.path.exists(path)), None)


@pytest.mark.parametrize("count", [1, 2, 255, 4095, 4096, 4097, 10**9])
def test_a_cast_has_a_thread_for_every_element_and_no_idle_block(count: int) -> None:
    geometry = cast_geometry(count)
    covered = geometry.blocks * geometry.threads * 16
    assert covered >= count
    assert covered - count < geometry.threads * 16


def test_an_inspection_is_the_same_on_every_card_and_bounded() -> None:
    assert inspect_geometry(1) == Geometry(1)
    assert inspect_geometry(4097) == Geometry(2)
    assert inspect_geometry(10**10) == Geometry(1024)
    assert CudaKernels.scratch_bytes([4097, 1]) == 48


def test_nothing_to_do_and_too_much_are_refused() -> None:
    for geometry in (cast_geometry, inspect_geometry):
        with pytest.raises(comm_core.InvalidUsage, match="0 elements need no launch"):
            geometry(0)
    with pytest.raises(comm_core.InvalidUsage, match="at most 2147483647"):
        cast_geometry(2**31 * 4096)


def test_which_kernels_there_are() -> None:
    assert cast_name(DType.FLOAT32, DType.BFLOAT16) == "cast_float32_bfloat16"
    assert cast_name(DType.FLOAT16, DType.FLOAT32) == "cast_float16_float32"
    assert cast_name(DType.FLOAT64, DType.FLOAT64) == "cast_float64_float64"
    for source, target in ((DType.FLOAT64, DType.FLOAT16), (DType.FLOAT16, DType.BFLOAT16), (DType.INT32, DType.INT32)):
        assert cast_name(source, target) is None


@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
@pytest.mark.skipif("TORCH_CUDA_ARCH_LIST" in os.environ, reason="TORCH_CUDA_ARCH_LIST chooses other targets")
def test_where_nvcc_is_kernels_are_compiled_for_three_targets() -> None:
    path = image_path()
    assert path is not None, notes()
    image = path.read_bytes()
    assert image_targets(image) == ["compute_80", "sm_80", "sm_90"]
    assert notes().startswith("compiled with ")
    wanted = {name for a in DType for b in DType if (name := cast_name(a, b))}
    wanted |= {f"inspect_{name}" for name in ("float16", "bfloat16", "float32", "float64", "fold")}
    assert not {name for name in wanted if name.encode() not in image}
    code = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", image.decode("latin1"), re.DOTALL))
    assert set(code) == wanted
    for name in wanted - {"inspect_fold"}:
        assert WIDE_LOADS[name.split("_")[0], name.split("_")[1]] in code[name], name


@pytest.mark.parametrize(
    ("nvcc", "reason"),
    [("", "no nvcc was found when comm_core was built"), (shutil.which("false"), r".*false failed \(1\)")],
    ids=["hidden", "broken"],
)
def test_without_nvcc_the_build_goes_on_and_torch_is_used(
    nvcc: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = ROOT / "comm_core" / "cmake" / "CompileKernels.cmake"
    files = [f"-DSOURCE={tmp_path}", f"-DIMAGE={tmp_path}/kernels.fatbin", f"-DNOTES={tmp_path}/kernels.txt"]
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert cmake is not None, "comm_core was built with one"
    subprocess.run([cmake, f"-DNVCC={nvcc}", *files, "-P", str(script)], check=True, capture_output=True)
    monkeypatch.setattr(cuda_kernels, "_folder", lambda: tmp_path)
    assert image_path() is None
    with pytest.raises(comm_core.Unsupported, match=f"CUDA kernels were not compiled: {reason}"):
        CudaKernels(0)
    with caplog.at_level("INFO", "dear"):
        assert kernels_on.__wrapped__(0) is None
    assert "torch's own functions cast and inspect on CUDA device 0: CUDA kernels were not compiled" in caplog.text


def test_what_is_no_fat_binary_is_refused() -> None:
    for image in (b"", b"\x7fELF" + bytes(60), struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 4) + bytes(4)):
        with pytest.raises(comm_core.InvalidUsage, match=f"these {len(image)} bytes are no fat binary"):
            image_targets(image)


@pytest.fixture
def kernels(gpu: Double, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CudaKernels:
    monkeypatch.setenv("COMM_CORE_CUDA", str(gpu.path))
    monkeypatch.setattr(cuda_kernels, "_folder", lambda: tmp_path)
    (tmp_path / "kernels.fatbin").write_bytes(struct.pack("<I", 0xBA55ED50) + bytes(60))
    made = CudaKernels(0)
    assert gpu.log()[-1] == "load module ba55ed50"
    return made


def test_a_launch_carries_its_arguments_and_its_stream(gpu: Double, kernels: CudaKernels) -> None:
    stream = gpu.stream()
    name = gpu.name(stream)
    kernels.cast(1024, DType.FLOAT32, 2048, DType.BFLOAT16, 5000, 0.25, stream)
    kernels.cast(1024, DType.FLOAT32, 2048, DType.BFLOAT16, 1, 1.0, 0)
    assert gpu.log() == [
        "function cast_float32_bfloat16",
        f"launch cast_float32_bfloat16 {name} 2x1x1 of 256, shared=0, source=1024 target=2048 count=5000 scale=0.25",
        "launch cast_float32_bfloat16 s0 1x1x1 of 256, shared=0, source=1024 target=2048 count=1 scale=1",
    ]
    kernels.inspect([(1024, DType.FLOAT16, 9000), (512, DType.FLOAT32, 1)], 4096, 8192, stream)
    assert gpu.log() == [
        "function inspect_float16",
        f"launch inspect_float16 {name} 3x1x1 of 256, shared=0, source=1024 target=4096 count=9000 scale=1",
        "function inspect_float32",
        f"launch inspect_float32 {name} 1x1x1 of 256, shared=0, source=512 target=4144 count=1 scale=1",
        "function inspect_fold",
        f"launch inspect_fold {name} 1x1x1 of 256, shared=0, source=4096 target=8192 count=4 scale=1",
    ]
    kernels.cast(1024, DType.FLOAT32, 2048, DType.BFLOAT16, 0, 1.0, stream)
    assert gpu.log() == [], "nothing to do"


def test_what_goes_wrong_names_the_call(gpu: Double, kernels: CudaKernels) -> None:
    with pytest.raises(comm_core.Unsupported, match="no kernel converts INT32 to INT32"):
        kernels.cast(1, DType.INT32, 1, DType.INT32, 1, 1.0, 0)
    with pytest.raises(comm_core.InvalidUsage, match=r"scale should be above 0 and is -1\.0"):
        kernels.cast(1, DType.FLOAT32, 1, DType.FLOAT32, 1, -1.0, 0)
    gpu.fail("cuLaunchKernel", 700)
    with pytest.raises(comm_core.CudaError, match=r"cuLaunchKernel: illegal address \(CUDA code 700\)"):
        kernels.cast(1, DType.FLOAT32, 1, DType.FLOAT32, 1, 1.0, 0)
    gpu.fail("cuModuleLoadData", 209)
    with pytest.raises(comm_core.CudaError, match=r"cuModuleLoadData: .*209"):
        CudaKernels(1)
    with pytest.raises(comm_core.Unsupported, match="there is no CUDA device 8; 8 can be seen"):
        CudaKernels(8)
