"""What dearrun refuses before it starts anything, in one line."""

from __future__ import annotations

import os

import pytest

from dearrun import options
from dearrun.errors import LaunchError
from dearrun.hosts import require_room
from dearrun.limits import of_processes


def test_more_workers_than_processes_are_refused_with_the_limit() -> None:
    limits = {"/proc/sys/kernel/pid_max": 32768, "ulimit -u": 500}
    require_room(500, limits)
    require_room(10**9, {})
    with pytest.raises(LaunchError, match=r"^-np 501: .* can start 500 workers at most \(ulimit -u\)") as raised:
        require_room(501, limits)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--hots", "a:1"], "dearrun has no --hots; is --hosts meant?"),
        (["--log-levle=info"], "dearrun has no --log-levle; is --log-level meant?"),
        (["--xyz"], "dearrun has no --xyz; dearrun --help has all flags"),
    ],
)
def test_a_flag_that_is_not_there_is_told_with_the_one_that_is_meant(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.parser().parse_args([*flags, "-np", "2", "python", "train.py"])
    assert f"dearrun: error: {told}\n" in capsys.readouterr().err


def test_more_workers_than_memory_has_room_for_are_refused() -> None:
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (10 * 2**20)
    with pytest.raises(LaunchError, match="at most"):
        require_room(room + 1, of_processes())


def test_the_limits_of_this_machine_are_known() -> None:
    require_room(2, of_processes())
    assert min(of_processes().values()) > 2
