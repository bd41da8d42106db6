"""Which launches can lose ranks and go on."""

from __future__ import annotations

import re

import pytest

from overlap.job.launch import Launch, Launcher
from overlap.job.regrouping import obstacle

AGENTS = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
WORKER = Launch(Launcher.TORCHRUN, 1, 3, 0, 1, "torchrun (WORLD_SIZE=3)")


def test_an_agent_for_each_worker_can() -> None:
    assert obstacle(AGENTS, WORKER, adopted=False) is None
    assert obstacle(AGENTS, Launch(Launcher.TORCHRUN, 3, 4, 1, 2), adopted=False) is None, "two hosts of two"
    assert obstacle(AGENTS, Launch(Launcher.TORCHRUN, 0, 1, 0, 1), adopted=False) is None


@pytest.mark.parametrize(
    ("environ", "launch", "adopted", "message"),
    [
        (AGENTS, Launch(Launcher.MPI, 0, 2, source="Open MPI"), False, "started by Open MPI; .*dearrun --restarts"),
        (AGENTS, Launch(Launcher.SINGLE), False, "started by no launcher; "),
        (AGENTS, Launch(Launcher.TORCHRUN, 0, 2, 0, 2), False, "one agent has started all 2 workers"),
        ({}, WORKER, False, "no store of an agent"),
        (AGENTS, WORKER, True, "the script has made its own connections"),
    ],
)
def test_others_are_told_how_to_start(environ: dict[str, str], launch: Launch, adopted: bool, message: str) -> None:
    found = obstacle(environ, launch, adopted)
    assert found is not None
    assert re.search(message, found)
