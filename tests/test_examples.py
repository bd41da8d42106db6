"""What the examples' command lines mean; that they run is shown in tests/spmd."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.harness import ROOT

#: What --small changes, and what it changes it to.
SMALL: dict[str, dict[str, Any]] = {
    "modules": {"epochs": 5},
    "horovod_mnist": {"epochs": 3, "batch_size": 16, "momentum": 0.9},
    "horovod_synthetic_benchmark": {
        "batch_size": 2,
        "num_warmup_batches": 2,
        "num_batches_per_iter": 2,
        "num_iters": 2,
    },
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
