"""Which launches can lose ranks and go on."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from comm_core import TransportError
from overlap.job import regrouping
from overlap.job.launch import Launch, Launcher, LaunchError
from overlap.job.regrouping import obstacle
from overlap.transport.torch.communicator import Wire

AGENTS = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
WORKER = Launch(Launcher.TORCHRUN, 1, 3, 0, 1, "torchrun (WORLD_SIZE=3)")
WIRE = Wire()


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


@pytest.fixture
def roster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a process whose ranks connect at the second try; `changes` says whether one was lost meanwhile."""
    comm, tries = SimpleNamespace(abandon=lambda: None), iter([TransportError("refused")])

    def connect(*_arguments: object) -> Any:
        for error in tries:
            raise error
        return comm

    watched: list[object] = []
    made = SimpleNamespace(comm=comm, watched=watched, watch=watched.append, ended=False, number=1, members=[0, 1])
    made.regroup, made.news = (lambda: 1), "rank 0 was lost"
    monkeypatch.setattr(regrouping, "_roster", made)
    monkeypatch.setattr("overlap.transport.torch.communicator.connect_generation", connect)
    monkeypatch.setattr("overlap.transport.torch.roster.agents_store", lambda *_arguments: None)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    return made


def test_a_rank_that_is_lost_while_ranks_connect_makes_them_try_again(roster: Any) -> None:
    """And one that is lost from then on ends what waits for it, before there is a session."""
    roster.changes = lambda: True
    assert regrouping.connect(WORKER, WIRE) is roster.comm
    assert roster.watched == [roster.comm.abandon]


def test_an_error_of_another_kind_is_raised(roster: Any) -> None:
    roster.changes = lambda: False
    with pytest.raises(TransportError, match="refused"):
        regrouping.connect(WORKER, WIRE)


def test_a_process_has_one_session(roster: Any) -> None:
    roster.ended = True
    with pytest.raises(LaunchError, match=r"init\(\) was called after shutdown\(\)"):
        regrouping.connect(WORKER, WIRE)
