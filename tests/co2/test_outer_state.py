"""How one rank asks the others for their shares of the outer state."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from co2.outer_state import ShareQuery
from overlap.transport.peer_queries import NoAnswer

SHARES: dict[int, Any] = {rank: {0: (rank, rank + 1, {"start": torch.zeros(1)})} for rank in (1, 2)}


class _Others:
    """Of whom rank 2 comes to the event that it is asked for when it is asked for the third time."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def ask(self, rank: int, topic: str, events: int) -> Future[Any]:
        assert (topic, events) == ("outer", 4)
        self.asked.append(rank)
        answer: Future[Any] = Future()
        answer.set_result(None if rank == 2 and self.asked.count(2) < 3 else SHARES[rank])
        return answer


def test_whoever_has_not_come_so_far_is_asked_again_and_nobody_else() -> None:
    others: Any = _Others()
    assert ShareQuery(others, "outer", [1, 2]).ask(4) == [SHARES[1], SHARES[2]]
    assert others.asked == [1, 2, 2, 2]


def test_whoever_never_comes_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("co2.outer_state._ANSWER_SECONDS", 0.0)
    others: Any = _Others()
    with pytest.raises(NoAnswer, match=r"ranks \[2\] did not come to event 4 within 0 s"):
        ShareQuery(others, "outer", [1, 2]).ask(4)
