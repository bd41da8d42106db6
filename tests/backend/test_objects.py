"""Python objects of different sizes between ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.backend.world import ALL, SEVERAL, equal, group_of
from tests.spmd_plugin import RANK, SIZE

LAST = SIZE - 1


@dataclasses.dataclass
class Told:
    rank: int
    text: str


def _object(rank: int) -> dict[str, object]:
    return {"rank": rank, "told": Told(rank, "x" * 1000 * rank), "tensor": torch.arange(rank), "nothing": None}


def _same(found: object, rank: int) -> None:
    assert isinstance(found, dict)
    assert (found["rank"], found["told"], found["nothing"]) == (rank, Told(rank, "x" * 1000 * rank), None)
    equal(found["tensor"], torch.arange(rank))


def test_all_gather_object() -> None:
    found: list[object] = [None] * SIZE
    dist.all_gather_object(found, _object(RANK))
    for rank in ALL:
        _same(found[rank], rank)


def test_gather_object() -> None:
    found: list[object] | None = [None] * SIZE if RANK == LAST else None
    dist.gather_object(_object(RANK), found, dst=LAST)
    for rank in ALL if found is not None else ():
        assert found is not None
        _same(found[rank], rank)


def test_broadcast_object_list() -> None:
    objects = [_object(3), "text", 5] if RANK == LAST else [None] * 3
    dist.broadcast_object_list(objects, src=LAST)
    _same(objects[0], 3)
    assert objects[1:] == ["text", 5]


def test_scatter_object_list() -> None:
    found: list[object] = [None]
    dist.scatter_object_list(found, [_object(rank) for rank in ALL] if RANK == 0 else None, src=0)
    _same(found[0], RANK)


@SEVERAL
def test_objects_from_rank_to_rank() -> None:
    if RANK == 0:
        dist.send_object_list([_object(2), "text"], dst=LAST)
    elif RANK == LAST:
        objects = [None, None]
        assert dist.recv_object_list(objects, src=0) == 0
        _same(objects[0], 2)
        assert objects[1] == "text"


@SEVERAL
def test_objects_within_a_group() -> None:
    ranks = [rank for rank in ALL if rank != 1 or SIZE == 2]
    with group_of(ranks) as group:
        if group is not None:
            found: list[object] = [None] * len(ranks)
            dist.all_gather_object(found, RANK, group=group)
            assert found == ranks


def test_an_object_that_cannot_be_pickled() -> None:
    with pytest.raises((TypeError, AttributeError)):
        dist.all_gather_object([None] * SIZE, lambda: None)
    found: list[object] = [None] * SIZE
    dist.all_gather_object(found, RANK)
    assert found == ALL
