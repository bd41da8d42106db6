"""The examples, run inside every rank: they learn, agree, and resume where they were. Lightning's: tests/integrations."""

from __future__ import annotations

import importlib
import io
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dear
from tests.harness import ROOT


@pytest.fixture(autouse=True)
def _session(request: pytest.FixtureRequest) -> None:
    dear.init()
    chosen = dear.size() == 2 or request.function is test_horovod_benchmark_measures
    if not chosen and os.environ.get("DEAR_SLOW_TESTS") != "1":
        pytest.skip("slow; tried at two ranks, under both launchers, while a cheaper example runs at every size")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture(autouse=True)
def _nothing_is_written_in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kill while a checkpoint is written would leave half of it under its name. Trainer has a way of its own."""
    if request.function is test_the_trainer_learns_and_resumes_bit_for_bit:
        yield
        return
    written: list[str] = []
    save = torch.save

    def recorded(state: Any, file: Any, **options: Any) -> None:
        if not isinstance(file, io.BytesIO):  # which messages between ranks are made in
            written.append(str(getattr(file, "name", file)))
        save(state, file, **options)

    monkeypatch.setattr(torch, "save", recorded)
    yield
    assert all(name.endswith(".part") for name in written), written


def _agreed(value: float) -> float:
    values = dear.allgather_object(value)
    assert len(set(values)) == 1, f"ranks disagree: {values}"
    return value


def _same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.full
def test_the_trainer_learns_and_resumes_bit_for_bit(example: Any, folder: Path) -> None:
    main = example("trainer").main
    accuracy, whole = main(["--small", "--output-dir", str(folder / "whole")])
    assert _agreed(accuracy) > 0.7
    main(["--small", "--output-dir", str(folder / "part"), "--stop-after", "2"])
    _, resumed = main(["--small", "--output-dir", str(folder / "part"), "--resume"])
    _same(resumed, whole)
    accuracy, _ = main(["--small", "--lora"])
    assert _agreed(accuracy) > 0.7


@pytest.mark.full
def test_horovod_mnist_learns(example: Any) -> None:
    options = ["--fp16-allreduce", "--gradient-predivide-factor", "2", "--use-mixed-precision"]
    assert _agreed(example("horovod_mnist").main(["--small", *options])) > 0.3


def test_horovod_imagenet_resumes_bit_for_bit(example: Any, folder: Path) -> None:
    main = example("horovod_imagenet").main
    options = ["--small", "--batches-per-allreduce", "2", "--checkpoint-format"]
    score, whole = main([*options, f"{folder}/a{{epoch}}.pt", "--epochs", "3"])
    assert _agreed(score) > 0
    if dear.rank() == 0:
        Path(f"{folder}/a2.pt").rename(f"{folder}/b2.pt")
    _, resumed = main([*options, f"{folder}/b{{epoch}}.pt", "--epochs", "3"])
    trained = {name for name in whole if "running" not in name and "num_batches" not in name}
    if dear.rank() == 0:
        trained = set(whole)
    _same({name: resumed[name] for name in trained}, {name: whole[name] for name in trained})


def test_co2_learns_as_fairscales_readme_has_it(example: Any) -> None:
    assert _agreed(example("co2_mnist").main(["--small"])) > 0.7


def test_horovod_benchmark_measures(example: Any) -> None:
    assert example("horovod_synthetic_benchmark").main(["--small", "--fp16-allreduce"]) > 0
