"""Runs inside every rank: the examples of Lightning learn, agree, and resume where they were."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import dear
from tests.harness import ROOT


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


def test_small_changes_only_what_was_not_asked_for(example: Any) -> None:
    arguments = example("lightning_module").arguments
    assert vars(arguments(["--small"])) == {**vars(arguments([])), "small": True, "epochs": 5}
    assert arguments(["--small", "--epochs", "11"]).epochs == 11


def test_the_module_is_fitted_and_resumed(example: Any, folder: Path) -> None:
    main = example("lightning_module").main
    options = ["--small", "--devices", str(dear.local_size())]
    metrics = main([*options])
    assert metrics["val_loss"] < 0.6 * metrics["val_power"]
    assert all(told == metrics for told in dear.allgather_object(metrics))
    main([*options, "--epochs", "3", "--output-dir", str(folder)])
    assert main([*options, "--resume", f"{folder}/last.ckpt"]) == metrics


def test_the_loop_of_fabric_learns(example: Any) -> None:
    loss = example("lightning_fabric").main(["--devices", str(dear.local_size())])
    assert loss < 1
    assert all(told == loss for told in dear.allgather_object(loss))
