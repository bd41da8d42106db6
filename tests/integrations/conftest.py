"""Files of this folder that run inside every rank have a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _session() -> None:
    if "DEAR_SPMD_SUITE" in os.environ:
        import dear  # parts of integrations are tested without

        dear.init()


@pytest.fixture(params=["dear", "fsdp"])
def ours(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes what Lightning's Trainer is given as its strategy; by fsdp, the smallest models are in several buckets."""
    from dear.integrations.lightning import DearStrategy

    options = {"threshold_mb": 0.0001} if request.param == "fsdp" else {}
    return lambda: DearStrategy(request.param, **options)
