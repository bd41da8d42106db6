"""co2: equal to its equations on one process, whoever waits for whom; and its part of every strategy's contract."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import co2
import dear
from overlap.roll import CannotJoin
from overlap.session import current
from tests.spmd.co2_simulation import Simulation
from tests.spmd.models import WIDTH
from tests.spmd.test_uneven import _end_of_a_failed_join

DOUBLE = torch.float64
FULL: dict[str, Any] = {"outer_lr": 0.8, "outer_momentum": 0.5, "outer_clip": 0.02, "gap_penalty": True}


@pytest.fixture(autouse=True)
def _session() -> None:
    co2.init()


def _model(dtype: torch.dtype = DOUBLE) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)).to(dtype)


def _loss(model: nn.Module, rank: int, step: int, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = (torch.randn(4, WIDTH, generator=generator, dtype=DOUBLE).to(dtype) for _ in range(2))
    return nn.functional.mse_loss(model(x), y)


def _momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 0.01)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def _wrapped(make: Callable[[Any], torch.optim.Optimizer] = _momentum, **arguments: Any) -> tuple[nn.Sequential, Any]:
    model = _model()
    return model, co2.DistributedOptimizer(make(model.parameters()), model, **arguments)


def _steps(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        _loss(model, co2.rank(), step).backward()
        optimizer.step()


def _same(model: nn.Module, expected: nn.Module) -> None:
    for (name, value), wanted in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        if co2.size() <= 2:
            assert torch.equal(value, wanted), name
        else:
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def _everywhere(model: nn.Module) -> bool:
    flat = torch.cat([value.detach().flatten() for value in model.state_dict().values()])
    return all(torch.equal(flat, other) for other in co2.allgather_object(flat))


@pytest.mark.parametrize(
    ("make", "frequency", "rule"),
    [
        (_momentum, 1, {"outer_lr": 1.0, "outer_momentum": 0.0, "outer_clip": None, "gap_penalty": False}),
        (_momentum, 3, {"outer_lr": 1.0, "outer_momentum": 0.0, "outer_clip": None, "gap_penalty": 1.5}),
        (_momentum, 3, FULL),
        (_adamw, 3, FULL),
    ],
    ids=["delayed", "constant-gap", "full", "full-adamw"],
)
def test_equals_its_equations_on_one_process(make: Any, frequency: int, rule: dict[str, Any]) -> None:
    model, optimizer = _wrapped(make, outer_frequency=frequency, **rule)
    simulation = Simulation(
        _model(),
        make,
        co2.size(),
        frequency=frequency,
        lr=rule["outer_lr"],
        momentum=rule["outer_momentum"],
        clip=rule["outer_clip"],
        penalty=rule["gap_penalty"],
    )
    for step in range(14):
        _steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: _loss(m, worker, step))
        _same(model, simulation.workers[co2.rank()][0])
        assert optimizer.local_steps == simulation.in_round
        if step == 10:
            optimizer.average_parameters()
            simulation.average()
            _same(model, simulation.workers[0][0])
            assert _everywhere(model)
    if rule["gap_penalty"] is True:
        assert len(set(simulation.gaps)) > 1, "the gap should vary"


def test_the_average_of_a_first_round_is_the_mean_of_the_ranks() -> None:
    model, optimizer = _wrapped(outer_frequency=100, **FULL)
    _steps(model, optimizer, range(3))
    local = [value.clone() for value in model.state_dict().values()]
    columns = zip(*co2.allgather_object(local), strict=True)
    optimizer.average_parameters()
    for value, column in zip(model.state_dict().values(), columns, strict=True):
        torch.testing.assert_close(value, sum(column) / co2.size(), rtol=1e-14, atol=1e-15)
    assert _everywhere(model)


def test_warm_up_with_sgd_is_synchronous_training() -> None:
    model, optimizer = _wrapped(warmup_steps=5, **FULL)
    expected = _model()
    plain = _momentum(expected.parameters())
    _steps(model, optimizer, range(5))
    for step in range(5):
        plain.zero_grad()
        sum(_loss(expected, rank, step) / co2.size() for rank in range(co2.size())).backward()
        plain.step()
    for value, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-13)
    assert optimizer.local_steps == 0


def test_no_rank_waits_for_a_round_before_the_next_has_ended() -> None:
    """The others go through a whole round, and the first step of one more, while one rank does not do anything."""
    model, optimizer = _wrapped(outer_frequency=3, **FULL)
    _steps(model, optimizer, range(3))
    gate = threading.Event()
    if co2.size() > 1:  # a letter opens the gate of the rank that has not moved
        current().mailroom.on("test/gate", lambda _sender, _news: gate.set())
        co2.barrier()
        if co2.rank() == 0:
            assert gate.wait(30), "another rank waits for this one though its round goes on"
    _steps(model, optimizer, range(3, 5))
    if co2.size() > 1 and co2.rank() == 1:
        current().mailroom.tell(0, "test/gate")
    _steps(model, optimizer, range(5, 6))


def test_whoever_has_to_wait_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = _wrapped(outer_frequency=1, **FULL)
    carry = optimizer._rounds._carry
    released = threading.Event()

    def slow(*arguments: Any) -> None:
        released.wait(0.05)
        carry(*arguments)

    optimizer._rounds._carry = slow
    with caplog.at_level(logging.WARNING, logger="dear"):
        _steps(model, optimizer, range(3))
    said = [record.getMessage() for record in caplog.records if "a larger outer_frequency hides it" in record.message]
    assert len(said) == 1


@pytest.mark.parametrize("steps", [5, 6, 7])
def test_resumes_bit_for_bit_wherever_it_was_saved(steps: int) -> None:
    model, optimizer = _wrapped(_adamw, outer_frequency=3, **FULL)
    _steps(model, optimizer, range(steps))
    saved = copy.deepcopy(
        (model.state_dict(), optimizer.state_dict())
    )  # torch hands out the tensors that it goes on with
    _steps(model, optimizer, range(steps, 11))
    other, resumed = _wrapped(_adamw, outer_frequency=3, **FULL)
    _steps(other, resumed, range(4))  # something else, with a round on its way
    resumed.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    _steps(other, resumed, range(steps, 11))
    for value, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(value, wanted)


def test_rank_0_alone_saves_while_others_go_on() -> None:
    model, optimizer = _wrapped(outer_frequency=2, **FULL)
    simulation = Simulation(_model(), _momentum, co2.size(), frequency=2, lr=0.8, momentum=0.5, clip=0.02, penalty=True)
    saved = None
    for step in range(9):
        _steps(model, optimizer, range(step, step + 1))
        if step <= 6:
            simulation.step(lambda m, worker, step=step: _loss(m, worker, step))
        if step == 6 and co2.rank() == 0:
            saved = optimizer.state_dict()
    if saved is not None:
        section = saved["co2"]
        assert (section["steps"], section["in_round"], section["events"]) == (7, 1, 3)
        for index, vectors in section["parameters"].items():
            wanted = {"start": simulation.start, "next": simulation.next, "momentum": simulation.m}
            for name, values in wanted.items():
                torch.testing.assert_close(vectors[name], values[index], rtol=1e-12, atol=1e-12)
        plain = _momentum(_model().parameters())
        plain.load_state_dict(saved)  # the section is passed over
        assert plain.state_dict()["state"].keys() == saved["state"].keys()


def test_each_rank_holds_its_share_of_the_outer_state() -> None:
    model, optimizer = _wrapped(outer_frequency=1, **FULL)
    _steps(model, optimizer, range(3))
    total = sum(param.numel() for param in model.parameters())
    for part in optimizer._rounds.parts:
        assert part.momentum.numel() == part.start.numel() == part.whole.numel() // co2.size()
    held = sum(part.momentum.numel() for part in optimizer._rounds.parts)
    assert total / co2.size() <= held < total / co2.size() + 8 * 4 * (1 + 1)  # aligned to 64 bytes


def test_a_checkpoint_without_outer_state_begins_a_round() -> None:
    model, optimizer = _wrapped(outer_frequency=2, **FULL)
    _steps(model, optimizer, range(5))
    fresh, plain = _model(), _momentum(_model().parameters())
    optimizer.load_state_dict(plain.state_dict())
    model.load_state_dict(fresh.state_dict())
    _steps(model, optimizer, range(6))
    other, fresh_optimizer = _wrapped(outer_frequency=2, **FULL)
    _steps(other, fresh_optimizer, range(6))
    for value, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(value, wanted)


def test_outer_state_of_another_model_is_refused() -> None:
    model, optimizer = _wrapped(outer_frequency=1, **FULL)
    _steps(model, optimizer, range(2))
    saved = optimizer.state_dict()
    saved["co2"]["parameters"][0] = {name: torch.zeros(2, 3) for name in ("start", "next", "momentum")}
    with pytest.raises(ValueError, match=r"parameter 0 has shape \(2, 3\), and the optimizer's parameter \(16, 9\)"):
        optimizer.load_state_dict(saved)


def test_a_scaler_may_skip_on_one_rank_alone() -> None:
    model, optimizer = _wrapped(_sgd, outer_frequency=2, **FULL)
    simulation = Simulation(_model(), _sgd, co2.size(), frequency=2, lr=0.8, momentum=0.5, clip=0.02, penalty=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(7):
        skips = step in (1, 4) and co2.size() > 1
        optimizer.zero_grad()
        loss = _loss(model, co2.rank(), step)
        scaler.scale(loss * float("inf") if skips and co2.rank() == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        simulation.step(lambda m, worker, step=step: _loss(m, worker, step), skip=(1,) if skips else ())
    assert optimizer.local_steps == 1
    _same(model, simulation.workers[co2.rank()][0])
    assert co2.size() == 1 or len(set(co2.allgather_object(scaler.get_scale()))) == 2


def test_accumulation_clipping_and_schedulers_are_local() -> None:
    model, optimizer = _wrapped(_sgd, outer_frequency=2, backward_passes_per_step=2, **FULL)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    alone = _model()
    mine = _sgd(alone.parameters())
    for _ in range(1):  # one local step of the first round
        optimizer.zero_grad()
        with optimizer.no_sync():
            _loss(model, co2.rank(), 0).backward()
        _loss(model, co2.rank(), 1).backward()
        norm = optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        schedule.step()
    for step in (0, 1):
        _loss(alone, co2.rank(), step).backward()
    assert torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01).item() == pytest.approx(norm.item())
    mine.step()
    for value, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-14)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.09)


def test_frozen_and_late_parameters() -> None:
    model, optimizer = _wrapped(outer_frequency=2, **FULL)
    model[0].requires_grad_(False)
    frozen = [value.clone() for value in model[0].parameters()]
    _steps(model, optimizer, range(5))
    assert all(torch.equal(value, kept) for value, kept in zip(model[0].parameters(), frozen, strict=True))
    assert {slot.index for part in optimizer._rounds.parts for slot in part.slots} == {2, 3}
    model[0].requires_grad_(True)
    _steps(model, optimizer, range(5, 9))
    model[2].requires_grad_(False)
    _steps(model, optimizer, range(9, 14))  # what was on its way when it was frozen has arrived by now
    held = [value.clone() for value in model[2].parameters()]
    _steps(model, optimizer, range(14, 19))
    assert all(torch.equal(value, kept) for value, kept in zip(model[2].parameters(), held, strict=True))
    optimizer.average_parameters()
    assert all(torch.equal(value, kept) for value, kept in zip(model[2].parameters(), held, strict=True))
    assert not torch.equal(model[0].weight, frozen[0])
    assert _everywhere(model)


def test_added_parameters_are_averaged_too() -> None:
    model, optimizer = _wrapped(outer_frequency=2, **FULL)
    _steps(model, optimizer, range(3))
    extra = nn.Parameter(torch.full((3,), float(co2.rank()), dtype=DOUBLE))
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    for step in range(3, 8):
        optimizer.zero_grad()
        (_loss(model, co2.rank(), step) + extra.sum() * (co2.rank() + 1)).backward()
        optimizer.step()
    optimizer.average_parameters()
    assert len({tuple(values) for values in co2.allgather_object(extra.tolist())}) == 1
    assert extra.tolist()[0] < 0


def test_other_types_and_layouts() -> None:
    torch.manual_seed(3)
    tensors = [
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(5, dtype=torch.complex64),
        torch.randn(7).bfloat16(),
        torch.zeros(0, 3),
        torch.tensor(1.0, dtype=DOUBLE),
    ]
    params = [nn.Parameter(tensor) for tensor in tensors]
    named = [(str(number), param) for number, param in enumerate(params)]
    optimizer = co2.DistributedOptimizer(torch.optim.SGD(params, 0.5), named, outer_frequency=2, **FULL)
    for step in range(6):
        torch.manual_seed(100 * step + co2.rank())
        optimizer.zero_grad()
        sum((param * torch.randn_like(param)).sum().abs() for param in params).backward()
        optimizer.step()
    saved = optimizer.state_dict()["co2"]["parameters"]
    assert {saved[number]["start"].dtype for number in (0, 1, 2)} == {torch.float32}
    assert saved[4]["start"].dtype == DOUBLE
    assert saved[1]["momentum"].shape == (5, 2)
    for number, param in enumerate(params):  # a round has just begun: everybody stands at its start
        expected = saved[number]["start"]
        expected = torch.view_as_complex(expected) if param.is_complex() else expected.to(param.dtype)
        assert torch.equal(param.detach(), expected)
    assert params[0].is_contiguous(memory_format=torch.channels_last)
    optimizer.average_parameters()
    for param in params:
        values = co2.allgather_object(torch.view_as_real(param.detach()) if param.is_complex() else param.detach())
        assert all(torch.equal(values[0], other) for other in values)


def test_parameters_of_16_bits_lose_nothing_to_rounding_where_nothing_is_learned() -> None:
    """The exact start of a round is not a bf16 value; local steps that change nothing must not pull it there."""
    param = nn.Parameter(torch.linspace(0.1, 1, 40).bfloat16())
    optimizer = co2.DistributedOptimizer(torch.optim.SGD([param], 1.0), [("p", param)], outer_frequency=1, **FULL)
    for step in range(8):
        optimizer.zero_grad()
        (param.float() * (0.003 * (co2.rank() + 1) if step < 2 else 0.0)).sum().backward()
        optimizer.step()
    for _ in range(40):  # momentum fades
        optimizer.zero_grad()
        (param * 0).sum().backward()
        optimizer.step()
    before = optimizer.state_dict()["co2"]["parameters"][0]["start"]
    optimizer.zero_grad()
    (param * 0).sum().backward()
    optimizer.step()
    after = optimizer.state_dict()["co2"]["parameters"][0]["start"]
    assert not torch.equal(after, after.bfloat16().float())
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)


def test_buffers_become_rank_0s_with_the_average() -> None:
    for told in (True, False):
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, WIDTH)).double()
        optimizer = co2.DistributedOptimizer(_sgd(model.parameters()), model, broadcast_buffers=told)
        _steps(model, optimizer, range(2))
        optimizer.average_parameters()
        means = [tuple(values) for values in co2.allgather_object(model[1].running_mean.tolist())]
        assert len(set(means)) == (1 if told else co2.size())


def test_a_group_averages_gradients_in_every_step() -> None:
    size = co2.size()
    group = 2 if size % 2 == 0 else 1
    model, optimizer = _wrapped(_sgd, outer_frequency=2, nprocs_per_node=group, **FULL)
    simulation = Simulation(_model(), _sgd, size // group, frequency=2, lr=0.8, momentum=0.5, clip=0.02, penalty=True)
    for step in range(7):
        _steps(model, optimizer, range(step, step + 1))
        simulation.step(
            lambda m, worker, step=step: sum(_loss(m, worker * group + i, step) for i in range(group)) / group
        )
    expected = simulation.workers[co2.rank() // group][0]
    for value, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    norm = optimizer.clip_grad_norm_(1.0)
    mates = [
        other for rank, other in enumerate(co2.allgather_object(float(norm))) if rank // group == co2.rank() // group
    ]
    assert len(set(mates)) == 1


def test_the_front_door_and_what_it_refuses() -> None:
    model = _model()
    optimizer = dear.DistributedOptimizer(_sgd(model.parameters()), model, strategy="co2", outer_frequency=4)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.strategy.terms["outer_frequency"] == 4
    assert "co2" in repr(optimizer)
    size = co2.size()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"outer_frequency": 0}, "outer_frequency should be a number of steps, at least 1, and is 0"),
        ({"outer_momentum": 1.5}, "outer_momentum should be at least 0 and below 1 and is 1.5"),
        ({"nprocs_per_node": size + 1}, f"should divide the number of ranks, {size}, and is {size + 1}"),
        ({"process_set": co2.ProcessSet([0])}, "co2 averages over all ranks"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            _wrapped(**arguments)
    with pytest.raises(ValueError, match="'co2' has nothing to tune"):
        dear.DistributedOptimizer(_sgd(model.parameters()), model, strategy="co2", tune=True)


def test_ranks_that_disagree_are_told() -> None:
    if co2.size() == 1:
        return
    with pytest.raises(ValueError, match=r"«outer_frequency=3» on rank 0 and «outer_frequency=5» on rank"):
        _wrapped(outer_frequency=3 if co2.rank() == 0 else 5)
    model, optimizer = _wrapped(outer_frequency=4)
    _steps(model, optimizer, range(4 if co2.rank() == 0 else 3))
    with pytest.raises(RuntimeError, match="rank 0 has made 1 and rank 1 0: every rank should make the same number"):
        optimizer.average_parameters()
    if co2.rank() > 0:
        _steps(model, optimizer, range(3, 4))
    optimizer.average_parameters()
    _loss(model, co2.rank(), 9).backward()
    with pytest.raises(RuntimeError, match="gradients wait for step"):
        optimizer.average_parameters()
    optimizer.zero_grad()


def test_joining_together_is_fine_and_alone_is_refused_everywhere() -> None:
    model, optimizer = _wrapped(outer_frequency=3)
    _steps(model, optimizer, range(4))
    co2.join()
    _steps(model, optimizer, range(4, 5))
    if co2.size() == 1:
        return
    go_on = co2.join if co2.rank() == 1 else functools.partial(_steps, model, optimizer, range(5, 12))
    with pytest.raises(CannotJoin, match="an average of parameters needs every rank, and ranks"):
        go_on()
    _end_of_a_failed_join(joined=co2.rank() == 1)


def test_one_rank_may_end_a_round_ahead() -> None:
    """As at shutdown(): who is behind sends the round that the others wait for."""
    model, optimizer = _wrapped(outer_frequency=2)
    _steps(model, optimizer, range(4 if co2.rank() == 0 else 3))
    current().services["co2"].close()
    assert set(co2.allgather_object(optimizer._rounds.events)) == {2}


def test_a_model_wrapped_again_belongs_to_the_new_optimizer() -> None:
    model, first = _wrapped(outer_frequency=1)
    _steps(model, first, range(2))
    second = co2.DistributedOptimizer(_sgd(model.parameters()), model, outer_frequency=1)
    assert first._rounds.parts == []
    _steps(model, second, range(2))
    _loss(model, co2.rank(), 2).backward()
    with pytest.raises(RuntimeError, match="went to a DistributedOptimizer that was made later"):
        first.step()
    second.zero_grad()
