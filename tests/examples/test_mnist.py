"""The example and mnist.sh: it learns, it resumes bit for bit, and it says what is wrong with its input."""

from __future__ import annotations

import gzip
import importlib.util
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.harness import ROOT, Result, run_ranks


def _train(size: int, *options: str | Path, launcher: str = "mpi") -> Result:
    argv = [str(ROOT / "examples" / "mnist.py"), *map(str, options)]
    return run_ranks(size, argv, launcher, timeout=400, env={"TQDM_DISABLE": "1"})


def _accuracy(result: Result) -> float:
    found = re.search(r"^test accuracy: ([\d.]+)%", result.check().output, re.MULTILINE)
    assert found, result.output
    return float(found.group(1))


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_learns_the_digits(size: int, tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    assert _accuracy(_train(size, "--plot", picture)) >= 97.0
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.full
def test_a_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """Under another launcher, too: at two ranks there is one order to add in."""
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    _train(2, "--epochs", "2", "--checkpoint", whole, launcher="mpi").check()
    _train(2, "--epochs", "1", "--checkpoint", parts, launcher="mpi").check()
    _train(2, "--epochs", "2", "--checkpoint", parts, "--resume", launcher="torchrun").check()
    _same(torch.load(whole), torch.load(parts), "checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.pt", "whole.pt"]


RECORDED = """
import runpy, sys
import torch
save = torch.save
def recorded(state, file, *others, **options):
    print("written to", getattr(file, "name", file), flush=True)
    save(state, file, *others, **options)
torch.save = recorded
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_checkpoint_is_not_written_in_place(tmp_path: Path) -> None:
    """A kill while it is written would leave half of it under its name."""
    argv = ["-c", RECORDED, str(ROOT / "examples" / "mnist.py"), "--epochs", "2", "--checkpoint"]
    result = run_ranks(1, [*argv, str(tmp_path / "run.pt")], "single", timeout=400, env={"TQDM_DISABLE": "1"}).check()
    written = re.findall("^written to (.*)$", result.output, re.MULTILINE)
    assert len(written) == 2
    assert all(name.endswith(".part") for name in written), written
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def _same(left: object, right: object, where: str) -> None:
    assert type(left) is type(right), where
    if isinstance(left, dict) and isinstance(right, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            _same(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, list) and isinstance(right, list):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            _same(one, other, f"{where}[{index}]")
    elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        assert torch.equal(left, right), where
    else:
        assert left == right, where


@pytest.mark.full
def test_resuming_with_other_settings_is_refused_once(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    _train(1, "--epochs", "1", "--checkpoint", path, launcher="single").check()
    result = _train(2, "--epochs", "2", "--checkpoint", path, "--resume", "--seed", "7")
    assert result.returncode != 0
    assert result.output.count("was made with seed 1, and this run has 7") == 1
    assert "Traceback" not in result.output


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    result = _train(1, "--data-dir", tmp_path, launcher="single")
    assert result.returncode == 1
    assert result.output.splitlines()[-1].endswith("--download fetches the four files")
    assert "Traceback" not in result.output


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mnist_data", ROOT / "examples" / "mnist_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mnist_data", module)
    spec.loader.exec_module(module)
    return module


def _idx(*shape: int, fill: int = 3) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + bytes([fill]) * _product(shape)


def _product(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _write_mnist(folder: Path) -> None:
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(_idx(20, 28, 28, fill=255)))
    (folder / "train-labels-idx1-ubyte").write_bytes(_idx(20))
    (folder / "t10k-images-idx3-ubyte").write_bytes(_idx(10, 28, 28))
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(10)))


def test_idx_files_plain_or_compressed(data: ModuleType, tmp_path: Path) -> None:
    _write_mnist(tmp_path)
    digits = data.mnist(tmp_path)
    assert digits.train_images.shape == (20, 1, 28, 28)
    assert digits.train_images.min() == 1.0
    assert digits.test_labels.tolist() == [3] * 10


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("train-images-idx3-ubyte.gz", b"not an IDX file at all", "is no IDX file"),
        ("train-images-idx3-ubyte.gz", _idx(20, 28, 28)[:-1], "says it holds 20 x 28 x 28 bytes, and holds 15679"),
        ("train-images-idx3-ubyte.gz", gzip.compress(_idx(20, 28, 28))[:-9], "cannot be read"),
        ("train-labels-idx1-ubyte", _idx(19), "holds 20 images"),
        ("train-labels-idx1-ubyte", _idx(20, fill=10), "the label 10"),
        ("t10k-images-idx3-ubyte", _idx(10, 27, 27), "different sizes"),
    ],
    ids=["no-idx", "too-short", "cut-off", "too-few-labels", "label-10", "other-size"],
)
def test_damaged_files_are_named(data: ModuleType, tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    _write_mnist(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(data.DataError, match=complaint) as caught:
        data.mnist(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_downloads_are_checked(data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, target = tmp_path / "mirror", tmp_path / "target"
    mirror.mkdir()
    for name in data.FILES:
        (mirror / f"{name}.gz").write_bytes(name.encode())
    absent = (tmp_path / "absent").as_uri() + "/"
    monkeypatch.setattr(data, "MIRRORS", (absent, mirror.as_uri() + "/"))
    with pytest.raises(data.DataError, match=r"SHA-256 is .* and should be"):
        data.download(target)
    assert list(target.iterdir()) == []
    monkeypatch.setattr(data, "FILES", {name: data._sha256(name.encode()) for name in data.FILES})
    data.download(target)
    assert len(list(target.iterdir())) == 4
    monkeypatch.setattr(data, "MIRRORS", (absent,))
    data.download(target)  # everything is there already
    (target / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(data.DataError, match=r"could not be downloaded.*leave out --download"):
        data.download(target)


# - mnist.sh: its variables are honoured, or it says what stands for them


def _mnist_sh(**variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "nworkers": "1", "hostfile": "none", "PY": "echo -E would run", **variables}
    return subprocess.run(
        ["bash", "mnist.sh", "--epochs", "1"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )


def test_the_python_may_hold_arguments_and_the_first_line_names_the_data() -> None:
    result = _mnist_sh()
    assert result.returncode == 0, result.stderr
    first, *rest = result.stdout.splitlines()
    assert first.startswith("mnist.sh: the digits that come with scikit-learn, 1 worker(s) over mpirun")
    assert any(f"would run {ROOT}/examples/mnist.py --epochs 1" in line for line in rest)


def test_gpuids_are_the_gpus_that_workers_see() -> None:
    result = _mnist_sh(PY="printenv CUDA_VISIBLE_DEVICES XDEBUG", gpuids="0,2")
    assert "0,2" in result.stdout


@pytest.mark.parametrize(
    ("rdma", "said"),
    [("1", "rdma=1 is ignored: InfiniBand verbs are not supported"), ("2", "name the interface in IB_INTERFACE")],
)
def test_what_is_not_honoured_is_said(rdma: str, said: str) -> None:
    result = _mnist_sh(rdma=rdma)
    assert said in result.stderr
    assert (result.returncode == 0) is (rdma == "1")
