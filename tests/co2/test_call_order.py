"""What a script forgets or mixes up around perform_co2()."""

from __future__ import annotations

import gc

import pytest
import torch

from co2.call_order import CallOrder, follow_steps


def _calls(order: CallOrder, calls: str) -> None:
    """Of two optimizers, a and b: a backward Pass, a step, perform_co2() told."""
    for call in calls:
        if call == "P":
            order.passed()
        elif call == "T":
            order.told()
        else:
            order.stepped(ord(call))


@pytest.mark.parametrize(
    "calls",
    [
        "PaTPaTPaT",
        "PPPaTPPPaT",  # passes that accumulate
        "PTPaTPTPTPaT",  # a GradScaler skips steps
        "PaPbTPbPaT",  # two optimizers, told together
        "PaTPbTPaT",  # or one by one
        "TPaT",
        "aTaTaT",  # no pass reached it
    ],
)
def test_what_is_right(calls: str) -> None:
    _calls(CallOrder(), calls)


@pytest.mark.parametrize("before", ["Pa", "PaTPa", "PaTPaP", "PaPb", "a"])
def test_a_step_that_nobody_was_told_of(before: str) -> None:
    order = CallOrder()
    _calls(order, before)
    with pytest.raises(RuntimeError, match=r"stepped twice, and perform_co2\(\) was not called between"):
        _calls(order, "a")


@pytest.mark.parametrize("before", ["PT", "PaTPT", "PTPT"])
def test_told_too_early(before: str) -> None:
    order = CallOrder()
    _calls(order, before)
    with pytest.raises(RuntimeError, match=r"perform_co2\(\) was called before optimizer\.step\(\)"):
        _calls(order, "a")
    _calls(order, "PaT")


def test_a_loop_that_is_left_in_the_middle_and_begun_again() -> None:
    for before in ("Pa", "PT"):
        order = CallOrder()
        _calls(order, before)
        order.restart()
        _calls(order, "a")


def test_the_steps_of_whoever_has_the_parameters_and_no_others() -> None:
    mine, strange = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    inner, optimizer, other = (torch.optim.SGD([param], 0.1) for param in (mine, mine, strange))
    first = CallOrder()
    follow_steps(first, [mine], but=inner)
    for _ in range(2):
        inner.step()
        other.step()
    optimizer.step()
    with pytest.raises(RuntimeError, match="stepped twice"):
        optimizer.step()
    second = CallOrder()
    follow_steps(second, [mine], but=inner)  # the first one is not told any more
    optimizer.step()
    second.told()
    optimizer.step()
    del second
    gc.collect()
    optimizer.step()
