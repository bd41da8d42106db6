"""Which buckets the optimizer updates in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from overlap.core.step import calls


@pytest.mark.parametrize(
    ("buckets", "launched", "sizes"),
    [
        (range(30), lambda _: True, [1, 2, 4, 8, 15]),
        (range(3), lambda _: False, [1, 1, 1]),
        ("abCDEf", str.isupper, [1, 1, 3, 1]),
        ("ABCd", str.isupper, [1, 2, 1]),
        ([], lambda _: True, []),
    ],
)
def test_neighbours_on_a_device_are_updated_together(
    buckets: Any, launched: Callable[[Any], bool], sizes: list[int]
) -> None:
    found = [*calls(buckets, launched)]
    assert [len(together) for together in found] == sizes
    assert [one for together in found for one in together] == [*buckets]
