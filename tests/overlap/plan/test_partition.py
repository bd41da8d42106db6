"""Plans are data: properties over random sizes, no communicator."""

from __future__ import annotations

import random

import pytest

from overlap.plan.partition import ALIGNMENT_BYTES, TensorSpec, fuse, layout, per_tensor, pieces


def _random_case(seed: int) -> tuple[list[list[int]], list[TensorSpec], int]:
    choose = random.Random(seed)
    specs = [
        TensorSpec(choose.choice([0, 1, 7, 64, 1000, 50_000]), itemsize, ("kind", itemsize))
        for itemsize in choose.choices([2, 4, 8], k=choose.randint(1, 30))
    ]
    units, index = [], 0
    while index < len(specs):
        length = choose.randint(1, 3)
        units.append(list(range(index, min(index + length, len(specs)))))
        index += length
    return units, specs, choose.choice([1, 2, 3, 4, 7])


@pytest.mark.parametrize("seed", range(50))
def test_every_tensor_has_one_aligned_place(seed: int) -> None:
    units, specs, world_size = _random_case(seed)
    buckets = fuse(units, specs, world_size, threshold_bytes=random.Random(seed).choice([1, 5000, 1e9]))
    placed = [index for bucket in buckets for index in bucket.tensors]
    assert sorted(placed) == list(range(len(specs)))
    for bucket in buckets:
        itemsize = specs[bucket.tensors[0]].itemsize
        assert len({specs[index].kind for index in bucket.tensors}) == 1
        assert list(bucket.tensors) == sorted(bucket.tensors)
        assert bucket.padded_numel % world_size == 0
        assert bucket.shares(world_size)[0] * itemsize % ALIGNMENT_BYTES == 0
        assert bucket.padded_numel - bucket.numel < max(1, world_size * ALIGNMENT_BYTES // itemsize) + 1
        end = 0
        for index, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            assert offset >= end
            assert offset * itemsize % ALIGNMENT_BYTES == 0
            end = offset + specs[index].numel
        assert end == bucket.numel


@pytest.mark.parametrize("seed", range(50))
def test_pieces_cover_each_tensor_once(seed: int) -> None:
    units, specs, world_size = _random_case(seed)
    for bucket in fuse(units, specs, world_size, threshold_bytes=1e9):
        numels = [specs[index].numel for index in bucket.tensors]
        covered: list[list[int]] = [[] for _ in numels]
        for rank in range(world_size):
            own = bucket.own(rank, world_size)
            for place, (start, stop), inside in pieces(bucket, numels, own):
                assert bucket.offsets[place] + start == own.start + inside.start
                assert inside.stop - inside.start == stop - start
                covered[place] += range(start, stop)
        assert covered == [list(range(numel)) for numel in numels]


def test_shards_end_with_the_tensors_of_an_owner() -> None:
    """16 elements of 4 bytes are a line of 64 bytes."""
    sizes, owners = (20, 5, 0, 33, 16), (2, 0, 0, 2, 0)
    specs = [TensorSpec(numel, 4, "fp32", owner) for numel, owner in zip(sizes, owners, strict=True)]
    bucket = layout(range(5), specs, 4)
    assert bucket.tensors == (1, 2, 4, 0, 3)
    assert bucket.offsets == (0, 16, 16, 32, 64)
    assert bucket.shares(4) == (32, 0, 80, 0)
    assert (bucket.numel, bucket.padded_numel) == (97, 112)
    assert bucket.own(2, 4) == slice(32, 112)


def test_an_owner_of_nothing_but_empty_tensors_has_a_shard() -> None:
    assert layout([0], [TensorSpec(0, 4, None, 1)], 2).shares(2) == (0, 16)


def test_owners_are_ranks() -> None:
    with pytest.raises(ValueError, match=r"below 2 and are \[0, 2\]"):
        layout([0, 1], [TensorSpec(3, 4, None, 0), TensorSpec(3, 4, None, 2)], 2)


@pytest.mark.parametrize("seed", range(50))
def test_no_tensor_with_an_owner_is_cut(seed: int) -> None:
    units, specs, world_size = _random_case(seed)
    choose = random.Random(seed)
    specs = [TensorSpec(s.numel, s.itemsize, s.kind, choose.randrange(world_size)) for s in specs]
    buckets = fuse(units, specs, world_size, threshold_bytes=choose.choice([1, 5000, 1e9]))
    assert sorted(index for bucket in buckets for index in bucket.tensors) == list(range(len(specs)))
    for bucket in buckets:
        end = 0
        for index, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            own = bucket.own(specs[index].owner or 0, world_size)
            assert end <= offset
            assert own.start <= offset
            end = offset + specs[index].numel
            assert end <= own.stop
            assert offset * specs[index].itemsize % ALIGNMENT_BYTES == 0
        assert sum(bucket.shares(world_size)) == bucket.padded_numel


FP32 = [TensorSpec(256, 4, "fp32")] * 6  # 1 KB each


@pytest.mark.parametrize(
    ("threshold_bytes", "num_nearby_units", "expected"),
    [
        (1024, None, [[0], [1], [2], [3], [4], [5]]),
        (2049, None, [[0, 1], [2, 3], [4, 5]]),
        (2048, None, [[0], [1], [2], [3], [4], [5]]),  # strictly below
        (None, 1, [[0], [1], [2], [3], [4], [5]]),
        (None, 4, [[0, 1, 2, 3], [4, 5]]),
        (3073, 2, [[0, 1], [2, 3], [4, 5]]),  # the first limit reached closes
        (1e9, None, [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_greedy_fusion(threshold_bytes: float | None, num_nearby_units: int | None, expected: list[list[int]]) -> None:
    units = [[index] for index in range(6)]
    buckets = fuse(units, FP32, 2, threshold_bytes=threshold_bytes, num_nearby_units=num_nearby_units)
    assert [list(bucket.tensors) for bucket in buckets] == expected


def test_a_layer_is_never_torn_apart() -> None:
    buckets = fuse([[0, 1, 2], [3, 4, 5]], FP32, 2, threshold_bytes=1)
    assert [bucket.tensors for bucket in buckets] == [(0, 1, 2), (3, 4, 5)]


def test_kinds_of_one_layer_fill_buckets_side_by_side() -> None:
    specs = [TensorSpec(8, 4, "fp32"), TensorSpec(8, 2, "bf16")] * 3
    buckets = fuse([[0, 1], [2, 3], [4, 5]], specs, 1, threshold_bytes=1e9)
    assert [bucket.tensors for bucket in buckets] == [(0, 2, 4), (1, 3, 5)]


def test_buckets_come_in_the_order_of_their_first_tensors() -> None:
    specs = [TensorSpec(8, 4, "fp32"), TensorSpec(999, 2, "bf16"), TensorSpec(999, 2, "bf16"), TensorSpec(8, 4, "fp32")]
    buckets = fuse([[0], [1], [2], [3]], specs, 1, threshold_bytes=1000)
    assert [bucket.tensors for bucket in buckets] == [(0, 3), (1,), (2,)]


def test_per_tensor_keeps_the_order() -> None:
    assert [bucket.tensors for bucket in per_tensor([3, 1, 2], FP32, 2)] == [(3,), (1,), (2,)]


def test_bad_limits() -> None:
    with pytest.raises(ValueError, match="above 0 bytes and is 0"):
        fuse([[0]], FP32, 1, threshold_bytes=0)
    with pytest.raises(ValueError, match="at least 1 and is 0"):
        fuse([[0]], FP32, 1, num_nearby_units=0)
    with pytest.raises(ValueError, match="at least one tensor"):
        layout([], FP32, 1)
