"""Which buckets the optimizer updates in one call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overlap.core.step import calls


@pytest.mark.parametrize(
    ("buckets", "launched", "sizes"),
    [
        ("s" * 30, True, [1, 2, 4, 8, 15]),
        ("sss", False, [1, 1, 1]),
        ("sswsss", True, [1, 1, 1, 3]),  # what is updated in full stands between
        ("", True, []),
    ],
)
def test_neighbours_on_a_device_are_updated_together(buckets: str, launched: bool, sizes: list[int]) -> None:
    made: Any = [SimpleNamespace(sharded=kind == "s") for kind in buckets]
    found = calls(made, launched)
    assert [len(together) for together in found] == sizes
    assert [one for together in found for one in together] == made
    assert all(len({one.sharded for one in together}) == 1 for together in found)
