"""Files of this folder that run inside every rank have a session."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _session() -> None:
    if "DEAR_SPMD_SUITE" in os.environ:
        import dear  # parts of integrations are tested without

        dear.init()
