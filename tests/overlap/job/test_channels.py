"""Who gets which channel, and when one is used again."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import comm_core
from overlap.job import channels as module
from overlap.job.channels import Channels, even
from overlap.transport.communicator import Communicator
from overlap.transport.native import NativeCommunicator


class Ranks:
    """Rank 0's channels; the other rank dropped `theirs` and issued `further` more operations on each channel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mine: set[str] = set()
        self.theirs: set[str] = set()
        self.further = 0
        self.forgotten: list[str] = []
        self.watched: list[Communicator] = []
        monkeypatch.setattr(module, "allgather_object", self._exchange)
        self.channels = Channels(
            NativeCommunicator(comm_core.local()), self.watched.append, lambda: self.mine, self.forgotten.append
        )

    def _exchange(self, _comm: Communicator, answer: Any) -> list[Any]:
        return [answer, (self.theirs, [issued + self.further for issued in answer[1]])]


def test_a_channel_is_used_again_when_all_ranks_have_dropped_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    first = ranks.channels.lease(2)
    ranks.channels.hold(first, "a")
    ranks.mine = {"a"}
    second = ranks.channels.lease(1)
    assert second[0] not in first
    ranks.channels.hold(second, "b")
    ranks.theirs = {"a"}
    assert ranks.channels.lease(2) == first
    assert ranks.forgotten == ["a"]
    assert len(ranks.channels) == len(ranks.watched) == 3


def test_a_channel_is_not_used_again_while_one_rank_has_issued_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    first = ranks.channels.lease(1)
    ranks.channels.hold(first, "a")
    ranks.mine = ranks.theirs = {"a"}
    ranks.further = 1
    assert ranks.channels.lease(1) != first
    assert ranks.forgotten == []
    ranks.further = 0
    assert ranks.channels.lease(1) == first
    assert ranks.forgotten == ["a"]


def test_a_channel_whose_lease_came_to_nothing_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    assert ranks.channels.lease(1) == ranks.channels.lease(1)


def test_many_channels_make_it_look_for_owners_in_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    monkeypatch.setattr(module, "_MANY", 1)
    monkeypatch.setattr(gc, "collect", lambda: ranks.mine.add("a"))
    first = ranks.channels.lease(1)
    ranks.channels.hold(first, "a")
    ranks.theirs = {"a"}
    assert ranks.channels.lease(1) == first


def test_an_owner_without_channels_goes_on_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether its ranks have issued as much as one another: it is of a process set."""
    ranks = Ranks(monkeypatch)
    ranks.mine = ranks.theirs = {"a"}
    ranks.channels.lease(1)
    assert ranks.forgotten == []


def test_channels_of_groups_are_even_where_each_group_is() -> None:
    assert even((), (3, 3, 3, 3))
    assert not even((), (3, 3, 4, 4))
    assert even((0, 0, 1, 1), (3, 3, 4, 4))
    assert even((0, 0, 1, 1), (3, 3, 3, 3))
    assert not even((0, 0, 1, 1), (3, 3, 4, 5))
    assert even((0, 1, 2, 3), (1, 2, 3, 4))


def test_a_channel_of_other_groups_is_not_used() -> None:
    channels = Channels(NativeCommunicator(comm_core.local()), lambda _channel: None, set, lambda _topic: None)
    everyone, alone = channels.lease(1), channels.lease(1, (5,))
    assert everyone != alone
    assert channels.lease(1, (5,)) == alone
    assert channels.lease(1) == everyone
    channels.hold(alone, "a")
    assert channels.lease(1, (5,)) != alone
    assert len(channels) == len(channels.all) == 3
