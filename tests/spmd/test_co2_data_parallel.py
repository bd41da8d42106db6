"""fairscale-CO2's class: a plain optimizer, and the same rounds as co2.DistributedOptimizer's."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import co2
from tests.spmd.co2_simulation import Simulation
from tests.spmd.co2_training import (
    PLAIN,
    PLAIN_SIMULATED,
    assert_equal,
    assert_same,
    equal_everywhere,
    loss_of,
    momentum_sgd,
    sgd,
    small_model,
)
from tests.spmd.listening import heard
from tests.spmd.models import WIDTH


def _wrapped(**arguments: Any) -> Any:
    return co2.CO2DistributedDataParallel(small_model(), **arguments)


def _steps(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, co2.rank(), step).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        model.perform_co2(optimizer)


def test_a_plain_optimizer_equals_the_equations_on_one_process() -> None:
    model = _wrapped(**PLAIN)
    optimizer = momentum_sgd(model.parameters())
    simulation = Simulation(small_model(), momentum_sgd, co2.size(), **PLAIN_SIMULATED)
    for step in range(11):
        _steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
        assert_same(model.module, simulation.workers[co2.rank()][0], measured_gap=False)
        assert model.local_steps == simulation.in_round
    model.average_parameters()
    simulation.average()
    assert_same(model.module, simulation.workers[0][0], measured_gap=False)
    assert equal_everywhere(model)


def test_the_readmes_line_is_cut_to_the_ranks_of_the_host_which_average_gradients() -> None:
    size = co2.size()
    with heard(logging.WARNING) as said:
        model = _wrapped(outer_momentum=0.2, nprocs_per_node=8)
    told = f"nprocs_per_node=8, and a host has {size} rank(s): gradients are averaged in groups of {size}"
    if size > 1:
        told += ", which is all of them: with nprocs_per_node=1 each rank steps alone"
    assert any(told in text for text in said) == (co2.rank() == 0)
    optimizer = sgd(model.parameters())
    simulation = Simulation(small_model(), sgd, 1, frequency=3, lr=1.0, momentum=0.2, clip=None, penalty=False)
    for step in range(8):
        loss_of(model, co2.rank(), step).backward()
        gradients = [param.grad.clone() for param in model.parameters()]
        assert all(torch.equal(gradients[0], other[0]) for other in co2.allgather_object(gradients)), "averages"
        optimizer.step()
        model.zero_grad(set_to_none=True)
        assert all(param.grad is None for param in model.parameters())
        model.perform_co2(optimizer)
        simulation.step(lambda m, _, step=step: sum(loss_of(m, rank, step) for rank in range(size)) / size)
    assert_equal(model, simulation.workers[0][0], 1e-12)
    assert equal_everywhere(model)


def test_what_scripts_do_between_backward_and_step_they_do_to_averages() -> None:
    """Several passes, clipping, a layer that is trained later: as with DDP."""
    size = co2.size()
    model, alone = _wrapped(nprocs_per_node=size, localsgd_frequency=100), small_model()
    optimizer, plain = momentum_sgd(model.parameters()), momentum_sgd(alone.parameters())
    for step in range(0, 8, 2):
        for one in (model.module, alone):
            one[0].requires_grad_(step >= 4)
        for number in (step, step + 1):
            loss_of(model, co2.rank(), number).backward()
            (sum(loss_of(alone, rank, number) for rank in range(size)) / size).backward()
        mine, theirs = (torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5) for one in (model, alone))
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        optimizer.step()
        plain.step()
        model.zero_grad()
        plain.zero_grad()
        model.perform_co2(optimizer)
    assert_same(model.module, alone)


class _Checkpointed(nn.Module):
    """Backward passes inside of one another, first of all in the layer that gradients come to first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inp = nn.Linear(WIDTH, 16)
        self.mid = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.out = nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.mid, self.mid, self.out):
            x = checkpoint(layer, self.inp(x) if x.shape[-1] == WIDTH else x, use_reentrant=True)
        return x


@pytest.mark.parametrize("whole", [True, False])
def test_passes_inside_of_one_another_end_once(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the outermost is not seen, as the script calls what is inside, gradients are averaged more often than once."""
    size, model, alone = co2.size(), _Checkpointed().double(), _Checkpointed().double()
    wrapper = co2.CO2DistributedDataParallel(model, nprocs_per_node=size)
    optimizer, plain, ends = momentum_sgd(model.parameters()), momentum_sgd(alone.parameters()), []
    average = wrapper._outer.local_step
    monkeypatch.setattr(wrapper._outer, "local_step", lambda: (ends.append(None), average()))
    for step in range(2):
        loss_of(wrapper if whole else model, co2.rank(), step).backward()
        (sum(loss_of(alone, rank, step) for rank in range(size)) / size).backward()
        optimizer.step()
        plain.step()
        wrapper.zero_grad()
        plain.zero_grad()
        wrapper.perform_co2(optimizer)
    assert len(ends) == (2 if whole else 8)
    assert_equal(model, alone, 1e-12)


def test_a_pass_that_raises_leaves_the_next_one_its_end() -> None:
    model, expected = _wrapped(**PLAIN), _wrapped(**PLAIN)
    optimizer, other = sgd(model.parameters()), sgd(expected.parameters())

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
            raise ArithmeticError("in backward")

    x = torch.zeros(4, WIDTH, dtype=torch.float64)
    with pytest.raises(ArithmeticError, match="in backward"):
        model.module[2](Fails.apply(model.module[0](x))).sum().backward()
    fails = model.module[1].register_forward_hook(lambda _module, _inputs, output: Fails.apply(output))
    with pytest.raises(ArithmeticError, match="in backward"):
        model(x).sum().backward()
    fails.remove()
    model.zero_grad()
    _steps(model, optimizer, range(5))
    _steps(expected, other, range(5))
    assert_same(model.module, expected.module)


def test_resumes_bit_for_bit() -> None:
    """Also in a loop that was left between a step and the call that tells of it."""
    model = _wrapped(**PLAIN)
    optimizer = momentum_sgd(model.parameters())
    _steps(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), model.outer_state_dict()))
    assert {name.partition(".")[0] for name in saved[0]} == {"module"}
    _steps(model, optimizer, range(5, 11))
    other = _wrapped(**PLAIN)
    resumed = momentum_sgd(other.parameters())
    loss_of(other, co2.rank(), 0).backward()
    resumed.step()
    other.zero_grad()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    other.load_outer_state_dict(saved[2])
    _steps(other, resumed, range(5, 11))
    assert_equal(other, model)


def test_buffers_and_start_are_rank_0s() -> None:
    torch.manual_seed(co2.rank())
    model: Any = co2.CO2DistributedDataParallel(
        nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4), nn.Linear(4, 9)).double(), 1
    )
    assert equal_everywhere(model)
    _steps(model, sgd(model.parameters()), range(2))
    assert co2.size() == 1 or not equal_everywhere(model)
    model.average_parameters()
    assert equal_everywhere(model)


def test_what_it_refuses() -> None:
    model = _wrapped(**PLAIN)
    with pytest.raises(ValueError, match="1 of the optimizer's 1 parameters are not the module's"):
        model.perform_co2(sgd([nn.Parameter(torch.zeros(1))]))
    with pytest.raises(TypeError, match=r"should get the plain torch\.optim\.Optimizer that has stepped"):
        model.perform_co2(model._outer)
    with pytest.raises(ValueError, match="the outer state is kept in fp32 by itself"):
        model.perform_co2(sgd(model.parameters()), fp32_params=[])
    with pytest.raises(TypeError, match=r"module should be a torch\.nn\.Module"):
        co2.CO2DistributedDataParallel(torch.zeros(1), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="localsgd_frequency=3: every round"):
        _wrapped(nprocs_per_node=1, outer_frequency=48)


def test_what_one_rank_refuses_all_do() -> None:
    """A script of one rank, started as several: nobody is left to wait for the others."""
    size = co2.size()
    if size > 1:
        with pytest.raises(
            ValueError, match=r"^on rank 1: process_rank=0, and the launcher says 1; leave it out$"
        ) as said:
            _wrapped(**PLAIN, process_rank=0)
        assert len(set(co2.allgather_object(str(said.value)))) == 1
        with pytest.raises(TypeError, match=r"^on rank 0: outer_lr should be a number"):
            _wrapped(nprocs_per_node=1, outer_lr="auto" if co2.rank() == 0 else 1.0)
    with pytest.raises(ValueError, match=f"^process_world_size={size + 1}, and the launcher says {size}"):
        _wrapped(**PLAIN, process_world_size=size + 1)


def test_a_forgotten_call_and_one_that_comes_too_early() -> None:
    model = _wrapped(**PLAIN)
    optimizer = sgd(model.parameters())
    _steps(model, optimizer, range(4))
    loss_of(model, co2.rank(), 4).backward()
    optimizer.step()
    loss_of(model, co2.rank(), 5).backward()
    with pytest.raises(RuntimeError, match=r"call model\.perform_co2\(optimizer\) after every optimizer\.step\(\)"):
        optimizer.step()
    _steps(model, optimizer, range(4))
    loss_of(model, co2.rank(), 4).backward()
    model.perform_co2(optimizer)
    with pytest.raises(RuntimeError, match=r"perform_co2\(\) was called before optimizer\.step\(\)"):
        optimizer.step()


def test_one_optimizer_is_told_of() -> None:
    """Another may take its place, or step beside it; two that are told of in turn would end rounds at half their length."""
    model, expected = _wrapped(**PLAIN), _wrapped(**PLAIN)
    first, second = (sgd(model.module[layer].parameters()) for layer in (0, 2))
    whole = sgd(expected.parameters())
    for step in range(7):
        loss_of(model, co2.rank(), step).backward()
        for optimizer in (first, second):
            optimizer.step()
        model.zero_grad()
        model.perform_co2(first)
    _steps(expected, whole, range(7))
    assert model.local_steps == expected.local_steps == 1
    assert_same(model.module, expected.module)
    _steps(model, second, range(7, 10))
    with pytest.raises(RuntimeError, match=r"perform_co2\(\) is called of two optimizers in turn"):
        _steps(model, first, range(10, 11))


def test_a_module_wrapped_again_belongs_to_the_new_one() -> None:
    first = _wrapped(**PLAIN)
    optimizer = sgd(first.parameters())
    _steps(first, optimizer, range(2))
    second = co2.CO2DistributedDataParallel(first.module, **PLAIN)
    with pytest.raises(RuntimeError, match="went to another one that was made later"):
        first.perform_co2(optimizer)
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    _steps(second, optimizer, range(7))
    second.average_parameters()
    assert equal_everywhere(second)
