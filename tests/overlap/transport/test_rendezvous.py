"""How torch.distributed's default group is begun; doubles in place of torch's functions."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import default_pg_timeout

from overlap.transport.torch import rendezvous
from overlap.transport.torch.rendezvous import begin_group, join_world


@pytest.mark.parametrize("has_set_timeout", [True, False])
def test_the_time_limit_for_connecting_ends_with_it_by_the_function_that_torch_has(
    has_set_timeout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.14 has a public one, and warns of the other."""
    calls: list[tuple[str, datetime.timedelta]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, timeout, **__: calls.append(("begins", timeout)))
    monkeypatch.setattr(distributed_c10d, "_set_pg_timeout", lambda timeout: calls.append(("deprecated", timeout)))
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    if has_set_timeout:
        monkeypatch.setattr(dist, "set_timeout", lambda timeout: calls.append(("public", timeout)), raising=False)
    setup = datetime.timedelta(seconds=7)
    begin_group(None, 0, 2, setup)
    assert calls == [("begins", setup), ("public" if has_set_timeout else "deprecated", default_pg_timeout)]


@pytest.mark.parametrize(("rank", "refusals"), [(0, 1), (1, 0), (1, 3)])
def test_a_rank_that_reaches_the_store_of_the_last_session_while_it_closes_tries_again(
    rank: int, refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 serves the store, so that its own failure is none of another session."""
    tries = 0

    def reach(_: str, rank: int, size: int) -> Iterator[tuple[HashStore, int, int]]:
        nonlocal tries
        tries += 1
        if tries <= refusals:
            raise dist.DistNetworkError("Failed to recv, got 0 bytes")
        yield HashStore(), rank, size

    monkeypatch.setattr(rendezvous, "rendezvous", reach)
    monkeypatch.setattr(rendezvous, "begin_group", lambda *_: None)
    if rank == 0:
        with pytest.raises(dist.DistNetworkError):
            join_world(1, lambda _: None, "tcp://127.0.0.1:1", rank, 1)
    else:
        join_world(1, lambda _: None, "tcp://127.0.0.1:1", rank, 1)
        assert tries == refusals + 1
