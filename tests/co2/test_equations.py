"""The outer step by hand, and what it degenerates to."""

from __future__ import annotations

import math

import pytest
import torch

from co2.equations import Co2Rule, DiLoCo, Ended, LocalSgd, SlowMo, eager_gradient
from co2.rules import RULES, outer_rule
from co2.schedule import Event, Schedule

PLAIN = Co2Rule(lr=1.0, momentum=0.0, clip=None, gap_penalty=False)


def _t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand() -> None:
    rule = Co2Rule(lr=0.5, momentum=0.25, clip=1.0, gap_penalty=2.0)
    started, mean, current = _t(4.0, 1.0, 0.0), _t(3.0, 9.0, 0.0), _t(3.5, 2.0, 7.0)
    following, momentum = rule.step(Ended(started, mean, current, _t(0.8, 0.4, -0.4), rule.gap(0, 0)))
    # 0.25 * 0.8 + (4 - 3) / 2;  0.25 * 0.4 + (1 - 9) / 2 = -3.9, clipped;  0.25 * -0.4
    assert momentum.tolist() == pytest.approx([0.7, -1.0, -0.1], abs=1e-15)
    assert following.tolist() == pytest.approx([3.5 - 0.35, 2.0 + 0.5, 7.0 + 0.05], abs=1e-15)


def test_arguments_are_left_alone() -> None:
    vectors = [_t(1, 2), _t(3, 4), _t(5, 6), _t(7, 8)]
    kept = [vector.clone() for vector in vectors]
    for rule in (Co2Rule(), LocalSgd(), SlowMo(), DiLoCo()):
        rule.step(Ended(*vectors, gap=1.5, inner_lr=0.1))
    assert all(torch.equal(vector, copy) for vector, copy in zip(vectors, kept, strict=True))


def test_without_staleness_momentum_or_clipping_it_is_periodic_averaging() -> None:
    started, mean = _t(1.0, -2.0), _t(0.25, 8.0)
    following, _ = PLAIN.step(Ended(started, mean, started, _t(5.0, 5.0)))
    assert following.tolist() == mean.tolist()


def test_one_step_rounds_of_sgd_are_sgd_with_gradients_one_step_old() -> None:
    """tau = 1, alpha = 1, beta = 0: x[t+1] = x[t] - lr g(x[t-1]). By hand for f(x) = x^2 / 2, lr 0.25, from 1."""
    x, before, seen = _t(1.0), _t(1.0), []
    for _ in range(4):
        mean = before - 0.25 * before
        x, before = PLAIN.step(Ended(before, mean, x, _t(0.0)))[0], x
        seen.append(float(x))
    assert seen == [0.75, 0.5, 0.3125, 0.1875]


def test_gap_by_hand() -> None:
    measured = Co2Rule(gap_penalty=True)
    assert measured.gap(0.0, 0.0) == 1  # nothing has moved yet
    assert measured.gap(3.0, 3.0) == 2  # the longest step so far
    assert measured.gap(1.0, 4.0) == 1.25
    assert Co2Rule(gap_penalty=False).gap(3.0, 3.0) == 1
    assert Co2Rule(gap_penalty=1.5).gap(3.0, 3.0) == 1.5


@pytest.mark.parametrize("phi", [0.1, 2.0])
def test_momentum_never_leaves_the_clip(phi: float) -> None:
    torch.manual_seed(0)
    momentum = torch.zeros(50)
    for _ in range(5):
        _, momentum = Co2Rule(clip=phi, momentum=0.9).step(Ended(*torch.randn(3, 50), momentum))
        assert momentum.abs().max() <= phi
    assert phi == 2.0 or bool((momentum.abs() == torch.tensor(phi)).any())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "outer_lr should be above 0 and is 0.0"),
        ({"lr": math.inf}, "outer_lr"),
        ({"momentum": 1.0}, "outer_momentum should be at least 0 and below 1 and is 1.0"),
        ({"clip": 0.0}, "outer_clip should be above 0, or None for no clipping, and is 0.0"),
        ({"gap_penalty": -1.0}, "gap_penalty should be True, False or a number above 0 and is -1.0"),
    ],
)
def test_what_is_no_rule_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Co2Rule(**arguments)


def test_calendar() -> None:
    calendar = Schedule(frequency=3, warmup=2)
    events, in_round = [], 0
    for step in range(1, 9):
        in_round += 1
        events.append(calendar.after(step, in_round))
        if events[-1] is not Event.NOTHING:
            in_round = 0
    nothing, average, turn = Event.NOTHING, Event.AVERAGE, Event.ROUND
    assert events == [average, average, nothing, nothing, turn, nothing, nothing, turn]
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="outer_frequency should be a number of steps, at least 1"):
            Schedule(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warmup_steps should be a number of steps, at least 0, and is -1"):
        Schedule(1, -1)


def test_rules_that_wait_by_hand() -> None:
    began, mean, momentum = _t(4.0, 1.0), _t(3.0, 2.0), _t(0.5, 0.0)
    following, kept = LocalSgd().step(Ended(began, mean, began, momentum))
    assert (following.tolist(), kept.tolist()) == ([3.0, 2.0], [0.0, 0.0])
    following, kept = SlowMo(lr=0.5, momentum=0.5).step(Ended(began, mean, began, momentum, inner_lr=_t(0.1, 0.0)))
    assert kept.tolist() == pytest.approx([0.25 + 10, 0.0])
    assert following.tolist() == pytest.approx([4 - 0.5 * 0.1 * 10.25, 2.0]), "where the rate is 0, the mean itself"
    following, kept = DiLoCo(lr=0.5, momentum=0.9).step(Ended(began, mean, began, momentum))
    assert kept.tolist() == pytest.approx([1.45, -1.0])
    assert following.tolist() == pytest.approx([4 - 0.5 * (1 + 0.9 * 1.45), 1 + 0.5 * 1.9])


def test_dilocos_outer_step_is_torchs_nesterov() -> None:
    torch.manual_seed(0)
    x, momentum = torch.randn(9, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    param = torch.nn.Parameter(x.clone())
    outer = torch.optim.SGD([param], 0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        mean = torch.randn(9, dtype=torch.float64)
        param.grad = param.detach() - mean
        outer.step()
        x, momentum = DiLoCo().step(Ended(x, mean, x, momentum))
        torch.testing.assert_close(x, param.detach(), rtol=1e-14, atol=1e-14)


def test_every_part_of_a_pseudo_gradient_counts_once_under_eager() -> None:
    """Whoever it is from, within two rounds, also where weights change with the number of workers."""
    torch.manual_seed(0)
    rounds = [torch.randn(3, 5, dtype=torch.float64) for _ in range(4)]  # of three workers
    zero = torch.zeros(5, dtype=torch.float64)
    for worker in range(3):
        seen, before, arrived, earlier = zero, zero, zero, 0.0
        each_and_last = [*rounds, torch.zeros(3, 5, dtype=torch.float64)]
        for each, weight in zip(each_and_last, (1 / 3, 1 / 2, 1, 1 / 3, 1), strict=True):
            seen = seen + eager_gradient(each[worker], before, arrived, weight, earlier)
            before, arrived, earlier = each[worker], each.mean(0), weight
        torch.testing.assert_close(seen, sum(each.mean(0) for each in rounds))


def test_options_are_the_rules_own() -> None:
    auto = dict.fromkeys(("outer_lr", "outer_momentum", "outer_clip", "gap_penalty"), "auto")
    assert {name: outer_rule(name, auto) for name in RULES} == {name: rule() for name, rule in RULES.items()}
    assert outer_rule("diloco", {**auto, "outer_lr": 1.0}) == DiLoCo(lr=1.0)
    with pytest.raises(ValueError, match=r"outer_lr=1\.0: outer='localsgd' takes no options of its own; leave it out"):
        outer_rule("localsgd", {**auto, "outer_lr": 1.0})
    with pytest.raises(
        ValueError, match="outer_clip=None: outer='slowmo' takes outer_lr and outer_momentum; leave it out"
    ):
        outer_rule("slowmo", {**auto, "outer_clip": None})
    with pytest.raises(ValueError, match=r"outer should be one of 'co2', 'localsgd'.* and is 'adam'"):
        outer_rule("adam", auto)
