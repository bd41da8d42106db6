"""Groups of some of the ranks, groups of the same ranks, meshes of groups, and the end of a group."""

from __future__ import annotations

import itertools
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.backend.world import (
    ALL,
    BACKEND,
    FOUR,
    OVER_GLOO,
    SEVERAL,
    all_gather_single,
    contents,
    equal,
    everybodys,
    fails_before,
    group_of,
    meet,
    reduce_scatter_single,
)
from tests.spmd_plugin import RANK, SIZE

SOME = [ranks for count in range(1, SIZE + 1) for ranks in itertools.combinations(ALL, count)]


def _total(ranks: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.stack(everybodys((5,), torch.float32, ranks)).sum(0)


@pytest.mark.parametrize("ranks", SOME, ids=str)
def test_every_group_of_ranks(ranks: tuple[int, ...]) -> None:
    """Those outside call nothing of it, and the default group goes on meanwhile."""
    with group_of(ranks) as group:
        everybody = torch.ones(3)
        work = dist.all_reduce(everybody, async_op=True)
        if group is not None:
            assert dist.get_world_size(group) == len(ranks)
            assert dist.get_rank(group) == ranks.index(RANK)
            assert dist.get_process_group_ranks(group) == list(ranks)
            assert dist.get_backend(group) == BACKEND
            tensor = contents(RANK, (5,), torch.float32)
            dist.all_reduce(tensor, group=group)
            equal(tensor, _total(ranks), "all_reduce")
            dist.broadcast(tensor.copy_(contents(RANK, (5,), torch.float32)), ranks[-1], group=group)
            equal(tensor, contents(ranks[-1], (5,), torch.float32), "broadcast, from a rank of the default group")
            whole = torch.empty(len(ranks) * 5)
            all_gather_single(whole, contents(RANK, (5,), torch.float32), group=group)
            equal(whole, torch.cat(everybodys((5,), torch.float32, ranks)), "all_gather")
            part = torch.empty(5)
            reduce_scatter_single(part, whole, group=group)
            equal(part, whole.chunk(len(ranks))[ranks.index(RANK)] * len(ranks), "reduce_scatter")
        work.wait()
        equal(everybody, torch.full((3,), float(SIZE)))


@SEVERAL
def test_ranks_of_a_group_in_another_order_are_sorted() -> None:
    with group_of(list(reversed(ALL))) as group:
        assert dist.get_process_group_ranks(group) == ALL


@SEVERAL
def test_two_groups_of_the_same_ranks_do_not_mix() -> None:
    """Each rank issues on them in an order of its own."""
    with group_of() as first, group_of() as second:
        tensors = {first: torch.full((4,), 1.0), second: torch.full((4,), 10.0)}
        order = [first, second] if RANK % 2 else [second, first]
        works = [dist.all_reduce(tensors[group], group=group, async_op=True) for group in order]
        for work in works:
            work.wait()
        equal(tensors[first], torch.full((4,), 1.0 * SIZE))
        equal(tensors[second], torch.full((4,), 10.0 * SIZE))


@SEVERAL
def test_operations_of_many_groups_are_on_their_way_at_once() -> None:
    groups = [dist.new_group(ALL) for _ in range(6)]
    tensors = [torch.full((20000,), float(number)) for number in range(6)]
    turns = list(range(6))
    random.Random(RANK).shuffle(turns)
    works = {number: dist.all_reduce(tensors[number], group=groups[number], async_op=True) for number in turns}
    for number in range(6):
        works[number].wait()
        equal(tensors[number], torch.full((20000,), float(number * SIZE)))
    for group in groups:
        dist.destroy_process_group(group)


def test_groups_come_and_go() -> None:
    """What one held, the next one may have."""
    for number in range(12):
        with group_of() as group:
            tensor = torch.full((100,), float(number))
            dist.all_reduce(tensor, group=group)
            equal(tensor, torch.full((100,), float(number * SIZE)))


@SEVERAL
def test_a_group_that_was_destroyed_by_one_rank_is_no_others_concern() -> None:
    group = dist.new_group(ALL)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    if RANK == 0:
        dist.destroy_process_group(group)
    meet()
    dist.all_reduce(tensor)
    equal(tensor, torch.full((2,), float(SIZE * SIZE)))
    if RANK != 0:
        dist.destroy_process_group(group)


@SEVERAL
def test_a_second_device_of_a_group_whose_members_have_other_groups() -> None:
    """Rank 0 has one group more."""
    with group_of([0]), group_of(backend=f"cpu:{BACKEND},cuda:gloo") as group:
        other = group._get_backend(torch.device("cuda"))
        assert (other.name(), other.rank(), other.size()) == ("gloo", RANK, SIZE)


def test_a_group_knows_its_name() -> None:
    with group_of(group_desc="pairs") as group:
        assert group.group_desc == "pairs"
        assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
        assert (group.rank(), group.size()) == (RANK, SIZE)


@FOUR
def test_new_subgroups() -> None:
    mine, groups = dist.new_subgroups(2)
    tensor = torch.tensor([float(RANK)])
    dist.all_reduce(tensor, group=mine)
    equal(tensor, torch.tensor([[1.0, 1.0, 5.0, 5.0][RANK]]))
    assert len(groups) == 2
    dist.destroy_process_group(mine)


@SEVERAL
@pytest.mark.skipif(OVER_GLOO and SIZE > 2, reason="gloo's halves never connect, in every second job (torch 2.13)")
def test_a_group_is_split() -> None:
    """By the group's own method: torch's function asks for a bound accelerator."""
    world = dist.group.WORLD
    assert world is not None
    halves = [ALL[: SIZE // 2], ALL[SIZE // 2 :]]
    here = next(half for half in halves if RANK in half)
    name, limit = f"half-{here[0]}", timedelta(seconds=20)
    part = world.split_group(here, timeout=limit, group_name=name, group_desc="a half")
    assert part is not None
    assert (part.size(), part.rank()) == (len(here), here.index(RANK))
    tensor = contents(RANK, (5,), torch.float32)
    part.allreduce([tensor]).wait()
    equal(tensor, _total(here))
    part.shutdown()


@SEVERAL
def test_ranks_that_are_in_no_part_of_a_split_have_none() -> None:
    world = dist.group.WORLD
    assert world is not None
    part = world.split_group([0], timeout=timedelta(seconds=20), group_name="alone", group_desc="")
    assert (part is None) is (RANK != 0)
    dist.barrier()


# - Meshes


def test_a_mesh_of_one_dimension() -> None:
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("data",))
    tensor = contents(RANK, (5,), torch.float32)
    dist.all_reduce(tensor, group=mesh.get_group("data"))
    equal(tensor, _total(ALL))
    assert mesh.get_local_rank() == RANK


@FOUR
@pytest.mark.four_ranks
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_a_mesh_of_two_dimensions(shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))
    numbers = torch.arange(4).reshape(shape)
    row, column = divmod(RANK, shape[1])
    for name, ranks in (("columns", numbers[row].tolist()), ("rows", numbers[:, column].tolist())):
        tensor = contents(RANK, (5,), torch.float32)
        dist.all_reduce(tensor, group=mesh.get_group(name))
        equal(tensor, _total(ranks), name)
    assert mesh["rows"].get_local_rank() == row


@fails_before("2.5")  # which has no flat meshes
@FOUR
@pytest.mark.four_ranks
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_a_mesh_made_flat(shape: tuple[int, int]) -> None:
    flat = init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))._flatten("all")
    tensor = contents(RANK, (5,), torch.float32)
    dist.all_reduce(tensor, group=flat.get_group())
    equal(tensor, _total(ALL), "flattened")
