"""Where ranks of several hosts meet, and when they make a group there. Without a network."""

from __future__ import annotations

import pytest

from overlap.job.default_group import Wish, why_not
from overlap.job.meeting import candidates, common
from overlap.transport.torch.interfaces import Address, owner

LOOPBACK, ETHERNET, BRIDGE = Address("127.0.0.1", "lo"), Address("10.0.0.1", "eth0"), Address("172.17.0.1", "docker0")
FAST = Address("10.1.0.1", "ib0")
ALL = [LOOPBACK, BRIDGE, ETHERNET, FAST]


@pytest.mark.parametrize(
    ("named", "included", "expected"),
    [
        ("", "", [ETHERNET, BRIDGE, FAST]),  # its own name's first
        ("ib0", "eth0", [FAST]),
        ("lo", "", [LOOPBACK]),
        ("", "ib0,docker0", [BRIDGE, FAST, ETHERNET]),
        ("", "10.1.0.0/16", [FAST, ETHERNET, BRIDGE]),
    ],
)
def test_which_addresses_are_tried(named: str, included: str, expected: list[Address]) -> None:
    assert candidates(ALL, ["127.0.1.1", "10.0.0.1"], named, included) == expected


def test_the_first_address_that_all_have_reached_is_taken() -> None:
    everything = ["172.17.0.1", "10.0.0.1", "10.1.0.1"]
    assert common([everything, ["10.1.0.1", "10.0.0.1"], ["10.0.0.1"]]) == "10.0.0.1"
    assert common([everything, ["172.17.0.1"], ["10.1.0.1"]]) is None
    assert common([[], []]) is None


def test_gloo_is_told_an_interface_by_its_first_address() -> None:
    virtual = Address("10.9.9.9", "lo")  # as some clusters have it: gloo, told lo, would take 127.0.0.1
    assert owner("10.9.9.9", [LOOPBACK, virtual]) is None
    assert owner("127.0.0.1", [LOOPBACK, virtual]) == LOOPBACK
    assert owner("10.0.0.1", ALL) == ETHERNET
    assert owner("10.0.0.2", ALL) is None


@pytest.mark.parametrize(
    ("odd", "everybodys"),
    [
        (Wish(False, False, True), "gave torch_distributed=False"),
        (Wish(True, True, True), "had initialised torch.distributed"),
        (Wish(True, False, False), "a torch without gloo"),
    ],
)
def test_ranks_make_a_group_together_or_not_at_all(odd: Wish, everybodys: str) -> None:
    usual = Wish(True, False, True)
    assert why_not([usual, usual, usual]) is None
    assert why_not([odd, odd, odd]) == ""
    told = why_not([usual, odd, odd])
    assert told is not None
    assert told.startswith("2 of 3 ranks")
    assert everybodys in told
    assert "rank 1;" in told
