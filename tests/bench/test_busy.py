"""A machine that others use: looked at before a run, waited for, refused, or marked."""

from __future__ import annotations

import pytest

from bench.train.cores import BUSY, Busy, look, others_share


def test_a_quiet_machine_is_told_at_once() -> None:
    shares = iter([0.04])
    assert look(allowed=False, share=lambda: next(shares)) == 0.04
    assert look(allowed=False, share=lambda: None) is None


def test_what_is_still_ending_is_waited_for() -> None:
    shares = iter([0.9, BUSY, 0.02, 0.9])
    assert look(allowed=False, share=lambda: next(shares)) == 0.02


def test_a_machine_that_stays_busy_is_refused_with_both_shares_and_the_remedy() -> None:
    looked = []

    def share() -> float:
        looked.append(1)
        return 0.73

    with pytest.raises(Busy, match=r"keep 73% of .* cores busy, and a measurement takes less than 10%: .* with --busy"):
        look(allowed=False, share=share)
    assert len(looked) > 1


def test_with_leave_it_is_told_and_nobody_waits() -> None:
    shares = iter([0.73])
    assert look(allowed=True, share=lambda: next(shares)) == 0.73


def test_the_kernel_counts_what_others_compute() -> None:
    found = others_share()
    assert found is not None
    assert 0 <= found <= 1
