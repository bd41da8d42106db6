"""What the examples' command lines mean; that they run is shown in tests/spmd."""

from __future__ import annotations

import importlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import ROOT

#: What --small changes, and what it changes it to.
SMALL: dict[str, dict[str, Any]] = {
    "horovod_mnist": {"epochs": 3, "batch_size": 16, "momentum": 0.9},
    "horovod_synthetic_benchmark": {
        "batch_size": 2,
        "num_warmup_batches": 2,
        "num_batches_per_iter": 2,
        "num_iters": 2,
    },
    "co2_mnist": {"epochs": 4},
    "horovod_imagenet": {"batch_size": 8, "warmup_epochs": 1},
}


@pytest.mark.parametrize("name", SMALL)
def test_small_changes_only_what_was_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    arguments = importlib.import_module(name).arguments
    plain, small = vars(arguments([])), vars(arguments(["--small"]))
    assert {each: small[each] for each in small if small[each] != plain[each]} == {"small": True, **SMALL[name]}
    for option in SMALL[name]:
        asked = ["--small", f"--{option.replace('_', '-')}", "11"]
        assert vars(arguments(asked)) == small | {option: 11}


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    save = importlib.import_module("checkpoint_file").save
    save(tmp_path / "a" / "checkpoint.pt", {"epoch": 1})

    def half(state: Any, file: Any) -> None:
        whole = io.BytesIO()
        really(state, whole)
        with open(file, "wb") if isinstance(file, str | Path) else file as opened:
            opened.write(whole.getvalue()[: whole.tell() // 2])
            opened.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    really = torch.save
    child = os.fork()
    if child == 0:
        torch.save = half
        save(tmp_path / "a" / "checkpoint.pt", {"epoch": 2})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert torch.load(tmp_path / "a" / "checkpoint.pt") == {"epoch": 1}
    save(tmp_path / "a" / "checkpoint.pt", {"epoch": 3})
    assert torch.load(tmp_path / "a" / "checkpoint.pt") == {"epoch": 3}
