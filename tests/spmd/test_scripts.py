"""Scripts with several optimizers, several models and other habits: what every strategy makes of them."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import dear
from tests.spmd.models import double_model
from tests.spmd.scripts import SCRIPTS, World
from tests.spmd.strategies import NAMELESS, PACKAGES, POLICIES, SHARDED, WRAP
from tests.spmd.training import assert_close

NOT_EAGER = {"gan", "saved_by_rank_0_alone"}  # drop gradients, or look at the state, between backward and step()
# Read parameters between passes, or come to a gradient twice in the first step, which `fsdp` tells them.
NOT_SHARDED = {"averaged_right_after_the_step", "two_backwards_through_shared_parts"}
Schedule = Callable[[torch.optim.Optimizer], Any]


@functools.cache
def _alone(script: str) -> Any:
    return SCRIPTS[script](World(lambda optimizer, _model: optimizer, None, dear.size()))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("strategy", [name for name in WRAP | NAMELESS if name not in POLICIES])
@pytest.mark.parametrize("script", SCRIPTS)
def test_parity(script: str, strategy: str) -> None:
    if ("eager" in strategy and script in NOT_EAGER) or (strategy in SHARDED and script in NOT_SHARDED):
        return
    actual = SCRIPTS[script](World((WRAP | NAMELESS)[strategy], dear.rank(), dear.size()))
    if actual is not None:
        assert_close(actual, _alone(script), script)


SCHEDULES: dict[str, Schedule] = {
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=True),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 3),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _epoch: 0.7),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=6),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.StepLR(o, 1)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, 0.02, 2),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # from torch 2.4's SequentialLR
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("on_inner", [False, True])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedulers_of_every_kind_act_in_time_and_warn_of_nothing(kind: str, on_inner: bool) -> None:
    def train(world: World) -> Any:
        model = double_model("Mlp")
        inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        optimizer = world.wrap(inner, model)
        if kind == "sequential":  # torch's own, which steps its parts at construction
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                schedule = SCHEDULES[kind](inner if on_inner else optimizer)
        else:
            schedule = SCHEDULES[kind](inner if on_inner else optimizer)
        rates = []
        for step in range(4):
            optimizer.zero_grad()
            model(world.share(step)).square().mean().backward()
            optimizer.step()
            schedule.step(*([1.0 + step] if kind == "plateau" else []))
            rates.append(inner.param_groups[0]["lr"])
        return model.state_dict(), rates, schedule.state_dict() if kind != "plateau" else None

    expected = train(World(lambda optimizer, _model: optimizer, None, dear.size()))
    actual = train(World(dear.DistributedOptimizer, dear.rank(), dear.size()))
    assert_close(actual[:2], expected[:2], kind)


@pytest.mark.parametrize("strategy", PACKAGES)
def test_lazy_modules_are_refused_with_a_remedy(strategy: str) -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d(affine=False), torch.nn.Linear(4, 2))
    inner = torch.optim.SGD(model.parameters(), 0.1)
    for named, name in ((model, "0.weight"), (list(model.named_parameters()), "0.weight"), (None, "0 of group 0")):
        with pytest.raises(ValueError, match=f"'{name}' belongs to a lazy module .* one forward"):
            WRAP[strategy](inner, named)
    with pytest.raises(ValueError, match="'running_mean' belongs to a lazy module"):
        WRAP[strategy](torch.optim.SGD(model[2].parameters(), 0.1), model[1])
    model(torch.ones(3, 3))
    optimizer = WRAP[strategy](inner, model)
    model(torch.ones(3, 3)).sum().backward()
    optimizer.step()


def test_no_rank_overtakes_a_step_whose_last_reduction_it_only_sends_in() -> None:
    """One rank owns each bucket; the others might update, and again, while rank 0 asks for the state after a step."""
    model = double_model("Mlp")
    inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    optimizer = dear.DistributedOptimizer(inner, model, policy="rb", threshold_mb=0.001)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 9, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        if dear.rank() == 0:
            time.sleep(0.05)  # the others have called their next step
            assert len(optimizer.state_dict()["state"]) == len(list(model.parameters())), step
