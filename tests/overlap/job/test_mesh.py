"""Where ranks lie on named axes, and which axes are no mesh of a job."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.job.mesh import laid_out


@pytest.mark.parametrize(
    ("axes", "ranks"),
    [
        ({"data": 4}, 4),
        ({"data": 2, "tensor": 3}, 6),
        ({"data": 2, "pipeline": 3, "tensor": 4}, 24),
        ({"pipeline": 1, "data": 2, "tensor": 1}, 2),
    ],
)
def test_the_last_axis_varies_fastest(axes: dict[str, int], ranks: int) -> None:
    layout = laid_out(axes, ranks)
    assert list(layout.shape.items()) == list(axes.items())
    cube = torch.arange(ranks).view(*axes.values())
    for rank in range(ranks):
        place = layout.coordinate(rank)
        assert list(place) == list(axes)
        assert cube[tuple(place.values())] == rank == layout.rank(place)
        for number, name in enumerate(axes):
            index: list[Any] = list(place.values())
            index[number] = slice(None)
            assert layout.along([name], rank) == tuple(cube[tuple(index)].tolist())
        assert layout.along([], rank) == (rank,)
        assert layout.along(list(axes), rank) == tuple(range(ranks))


def test_several_axes_together_and_the_groups_of_all_ranks() -> None:
    layout = laid_out({"data": 2, "pipeline": 2, "tensor": 2}, 8)
    assert layout.along({"data", "tensor"}, 2) == layout.along(["tensor", "data"], 7) == (2, 3, 6, 7)
    assert layout.groups(["data", "tensor"]) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert layout.groups(["data"]) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups([]) == [(rank,) for rank in range(8)]


@pytest.mark.parametrize(
    ("axes", "ranks", "expected"),
    [
        ({"data": -1, "tensor": 2}, 8, {"data": 4, "tensor": 2}),
        ({"data": 2, "tensor": -1}, 2, {"data": 2, "tensor": 1}),
        ({"data": -1}, 1, {"data": 1}),
    ],
)
def test_one_axis_takes_the_rest(axes: dict[str, int], ranks: int, expected: dict[str, int]) -> None:
    assert laid_out(axes, ranks).shape == expected


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 2, "tensor": 3}, r"^data=2 × tensor=3 are 6 ranks, and the job has 4$"),
        ({"data": 1}, "data=1 is 1 rank, and the job has 4"),
        ({"data": 4, "tensor": 0}, "tensor=0 should be a number of ranks, at least 1, or -1 for the rest"),
        ({"data": -2}, "data=-2 should be a number of ranks"),
        ({"data": 4.0}, r"data=4\.0 should be a number of ranks"),
        ({"data": True, "tensor": 4}, "data=True should be a number of ranks"),
        (
            {"data": -1, "tensor": -1},
            "data=-1 × tensor=-1: one axis may be -1, the rest of the job's 4 ranks, and 2 are",
        ),
        ({"data": -1, "tensor": 3}, "3 ranks do not divide the job's 4, so data cannot be the rest"),
        ({"data parallel": 4}, "the axis 'data parallel' of the mesh has no name that is an identifier"),
        ({}, r"a mesh has at least one axis, such as Mesh\(data=4\)"),
    ],
)
def test_axes_that_are_no_mesh(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laid_out(axes, 4)


def test_an_axis_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"no axis 'dta': its axes are data, tensor"):
        laid_out({"data": 2, "tensor": 2}, 4).check(["data", "dta"])
