"""Whether operations go in two levels, as the hosts, a variable and a probe say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overlap.job import two_levels
from overlap.job.levels import Levels
from overlap.job.two_levels import between_hosts

TWO = ((0, 1), (2, 3))


def _session(wish: str, hosts: tuple[tuple[int, ...], ...]) -> Any:
    channels = SimpleNamespace(lease=lambda count, levels=None: [levels] * count)
    settings = SimpleNamespace(two_level=wish)
    return SimpleNamespace(levels=None, settings=settings, hosts=hosts, channels=channels, control=None)


@pytest.mark.parametrize("hosts", [((0, 1, 2, 3),), ((0,), (1,)), ((0, 1), (2,))])
@pytest.mark.parametrize("wish", ["auto", "1"])
def test_hosts_without_groups_have_one_level(wish: str, hosts: tuple[tuple[int, ...], ...]) -> None:
    assert between_hosts(_session(wish, hosts)) is None


@pytest.mark.parametrize(("wish", "expected"), [("0", None), ("1", Levels("two_level", TWO))])
def test_the_variable_decides(wish: str, expected: Levels | None) -> None:
    assert between_hosts(_session(wish, TWO)) == expected


@pytest.mark.parametrize(("seconds", "expected"), [([1.0, 0.9], True), ([1.0, 0.99], False), ([1.0, 2.0], False)])
def test_the_probe_decides_once(seconds: list[float], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    probed = []

    def measured(comms: list[Any]) -> list[float]:
        probed.append(comms)
        return seconds

    monkeypatch.setattr(two_levels, "_measured", measured)
    monkeypatch.setattr(two_levels, "agree", lambda _comm, value: value)
    session = _session("auto", TWO)
    assert [between_hosts(session) is not None for _ in range(2)] == [expected] * 2
    assert probed == [[None, Levels("two_level", TWO)]]
