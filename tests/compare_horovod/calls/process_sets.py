"""Process sets. Those that calls share are made by whichever call comes first in a process."""

from __future__ import annotations

from typing import Any

from tests.compare_horovod.calls.call import Calls, gradient, ones, ramp

__all__ = ["CALLS"]

_made: list[Any] = []


def _pair(hvd: Any, n: int) -> list[Any]:
    """The sets of the even and of the odd ranks."""
    if not _made:
        _made.extend(hvd.add_process_set(list(range(first, n, 2))) for first in (0, 1))
    return _made


def _mine(hvd: Any, r: int, n: int) -> Any:
    return _pair(hvd, n)[r % 2]


def _other(hvd: Any, r: int, n: int) -> Any:
    return _pair(hvd, n)[1 - r % 2]


def _described(each: Any) -> Any:
    return [each.ranks, each.rank(), each.size(), each.included()]


def _removed(hvd: Any, n: int, use: Any) -> Any:
    """`use` of a set that is none any more; the pair is made anew by the next call."""
    pair = list(_pair(hvd, n))
    _made.clear()
    first = [hvd.remove_process_set(each) for each in pair]
    return [first, pair[0].process_set_id, list(pair[0].ranks), use(pair[0])]


def _unregistered(hvd: Any, r: int, n: int) -> Any:
    return hvd.allreduce(ones(2), process_set=hvd.ProcessSet([0]))


CALLS: Calls = {
    "the sets": lambda hvd, r, n: [list(each.ranks) for each in _pair(hvd, n)],
    "ids": lambda hvd, r, n: [each.process_set_id for each in _pair(hvd, n)],
    "this rank's": lambda hvd, r, n: _described(_mine(hvd, r, n)),
    "the global one": lambda hvd, r, n: _described(hvd.global_process_set),
    "as text": lambda hvd, r, n: str(hvd.ProcessSet([0, 1])),
    "rank in the other": lambda hvd, r, n: _other(hvd, r, n).rank(),
    "size of the other": lambda hvd, r, n: _other(hvd, r, n).size(),
    "included in the other": lambda hvd, r, n: _other(hvd, r, n).included(),
    "allreduce": lambda hvd, r, n: hvd.allreduce(ones(2) * (r + 3), process_set=_mine(hvd, r, n), op=hvd.Sum),
    "allreduce averaged": lambda hvd, r, n: hvd.allreduce(ones(2) * (r + 3), process_set=_mine(hvd, r, n)),
    "allgather": lambda hvd, r, n: hvd.allgather(ones(r + 1), process_set=_mine(hvd, r, n)),
    "broadcast": lambda hvd, r, n: hvd.broadcast(ones(2) * r, r % 2, process_set=_mine(hvd, r, n)),
    "reducescatter": lambda hvd, r, n: hvd.reducescatter(ramp(4, r), process_set=_mine(hvd, r, n)),
    "grouped_allreduce": lambda hvd, r, n: hvd.grouped_allreduce([ones(2) * r], process_set=_mine(hvd, r, n)),
    "d reducescatter": lambda hvd, r, n: gradient(
        lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=_mine(hvd, r, n)), 4, r
    ),
    "d grouped_allgather": lambda hvd, r, n: gradient(
        lambda x: hvd.grouped_allgather([x], process_set=_mine(hvd, r, n)), 2, r
    ),
    "broadcast_object": lambda hvd, r, n: hvd.broadcast_object({"a": r}, r % 2, process_set=_mine(hvd, r, n)),
    "barrier": lambda hvd, r, n: hvd.barrier(process_set=_mine(hvd, r, n)),
    "allreduce in the other": lambda hvd, r, n: hvd.allreduce(ones(2), process_set=_other(hvd, r, n), name="o1"),
    "allgather in the other": lambda hvd, r, n: hvd.allgather(ones(2), process_set=_other(hvd, r, n), name="o2"),
    "broadcast in the other": lambda hvd, r, n: hvd.broadcast(ones(2), 1 - r % 2, process_set=_other(hvd, r, n)),
    "barrier of the other": lambda hvd, r, n: hvd.barrier(_other(hvd, r, n)),
    "a root outside": lambda hvd, r, n: hvd.broadcast(ones(2), 1 - r % 2, process_set=_mine(hvd, r, n), name="out"),
    "process_set=None": lambda hvd, r, n: hvd.allreduce(ones(1), process_set=None, name="none"),
    "process_set=0": lambda hvd, r, n: hvd.allreduce(ones(1), process_set=0, name="zero"),
    "not registered": _unregistered,
    "not registered, its rank": lambda hvd, r, n: hvd.ProcessSet([0, 1]).rank(),
    "not registered, included": lambda hvd, r, n: hvd.ProcessSet([0, 1]).included(),
    "of a range": lambda hvd, r, n: list(hvd.ProcessSet(range(2)).ranks),
    "in descending order": lambda hvd, r, n: list(hvd.ProcessSet([1, 0]).ranks),
    "equal": lambda hvd, r, n: hvd.ProcessSet([0]) == hvd.ProcessSet([0]),
    "a rank twice": lambda hvd, r, n: list(hvd.ProcessSet([0, 0]).ranks),
    "all ranks again": lambda hvd, r, n: hvd.add_process_set(list(range(n))).process_set_id,
    "the same ranks again": lambda hvd, r, n: hvd.add_process_set(list(_pair(hvd, n)[0].ranks)).process_set_id,
    "the same set again": lambda hvd, r, n: hvd.add_process_set(_pair(hvd, n)[0]).process_set_id,
    "other ranks on each": lambda hvd, r, n: hvd.add_process_set([min(r, 1)]).process_set_id,
    "removed": lambda hvd, r, n: _removed(hvd, n, lambda gone: None),
    "removed, included": lambda hvd, r, n: _removed(hvd, n, lambda gone: gone.included()),
    "removed, removed again": lambda hvd, r, n: _removed(hvd, n, hvd.remove_process_set),
    "removed, used": lambda hvd, r, n: _removed(hvd, n, lambda gone: hvd.allreduce(ones(1), process_set=gone)),
    "the global one removed": lambda hvd, r, n: hvd.remove_process_set(hvd.global_process_set),
    "no ranks": lambda hvd, r, n: hvd.add_process_set([]).process_set_id is None,
    "a rank outside the job": lambda hvd, r, n: hvd.add_process_set([0, n + 5]).process_set_id is None,
}
