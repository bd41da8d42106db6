"""A rank in join() where others are lost: in a job that goes on without them, nobody tells it that they have left."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from comm_core import TransportError
from overlap.features.join import JoinedRanks


class _Queries:
    """Everybody answers that nothing was said."""

    def on(self, topic: str, handler: Any) -> None:
        pass

    def ask(self, rank: int, topic: str, question: Any) -> Future[Any]:
        receipt: Future[Any] = Future()
        receipt.set_result([])
        return receipt


@pytest.mark.timeout(30)
def test_who_waits_for_others_hears_that_they_are_lost() -> None:
    looked = []

    def heed() -> None:
        looked.append(1)
        if len(looked) == 2:
            raise TransportError("rank(s) [1] of 2 are lost")

    comm: Any = SimpleNamespace(rank=0, size=2)
    queries: Any = _Queries()
    joined = JoinedRanks(comm, queries, left=list, heed=heed)
    with pytest.raises(TransportError, match="are lost"):
        joined.join()
    assert joined.failed_here
    assert not joined.following
