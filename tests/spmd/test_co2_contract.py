"""What co2 has to do with every strategy's contract: scalers, frozen parameters, types, groups, mistakes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import co2
import dear
from overlap.job.session import current
from tests.spmd.co2_simulation import Simulation
from tests.spmd.co2_training import (
    DOUBLE,
    FULL,
    add_and_train,
    assert_equal,
    assert_same,
    equal_everywhere,
    loss_of,
    sgd,
    small_model,
    train_steps,
    wrapped,
)
from tests.spmd.models import WIDTH


def test_a_scaler_may_skip_on_one_rank_alone() -> None:
    model, optimizer = wrapped(sgd, outer_frequency=2, **FULL)
    simulation = Simulation(small_model(), sgd, co2.size(), frequency=2, lr=0.8, momentum=0.5, clip=0.02, penalty=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(7):
        skips = step in (1, 4) and co2.size() > 1
        optimizer.zero_grad()
        loss = loss_of(model, co2.rank(), step)
        scaler.scale(loss * float("inf") if skips and co2.rank() == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step), skip=(1,) if skips else ())
    assert optimizer.local_steps == 1
    assert_same(model, simulation.workers[co2.rank()][0])
    assert co2.size() == 1 or len(set(co2.allgather_object(scaler.get_scale()))) == 2


def test_accumulation_clipping_and_schedulers_are_local() -> None:
    model, optimizer = wrapped(sgd, outer_frequency=2, backward_passes_per_step=2, **FULL)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    alone = small_model()
    mine = sgd(alone.parameters())
    for _ in range(1):  # one local step of the first round
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, co2.rank(), 0).backward()
        loss_of(model, co2.rank(), 1).backward()
        norm = optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        schedule.step()
    for step in (0, 1):
        loss_of(alone, co2.rank(), step).backward()
    assert torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01).item() == pytest.approx(norm.item())
    mine.step()
    for value, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-14)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.09)


def test_frozen_and_late_parameters() -> None:
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    model[0].requires_grad_(False)
    frozen = [value.clone() for value in model[0].parameters()]
    train_steps(model, optimizer, range(5))
    assert all(torch.equal(value, kept) for value, kept in zip(model[0].parameters(), frozen, strict=True))
    assert {slot.index for part in optimizer.rounds.parts for slot in part.slots} == {2, 3}
    model[0].requires_grad_(True)
    train_steps(model, optimizer, range(5, 9))
    model[2].requires_grad_(False)
    train_steps(model, optimizer, range(9, 14))  # what was on its way when it was frozen has arrived by now
    held = [value.clone() for value in model[2].parameters()]
    train_steps(model, optimizer, range(14, 19))
    assert all(torch.equal(value, kept) for value, kept in zip(model[2].parameters(), held, strict=True))
    optimizer.average_parameters()
    assert all(torch.equal(value, kept) for value, kept in zip(model[2].parameters(), held, strict=True))
    assert not torch.equal(model[0].weight, frozen[0])
    assert equal_everywhere(model)


def test_added_parameters_are_averaged_too() -> None:
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    train_steps(model, optimizer, range(3))
    extra = add_and_train(model, optimizer, range(3, 8))
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


@pytest.mark.parametrize("steps", [0, 3])
def test_average_save_and_load_in_inference_mode(steps: int) -> None:
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    expected, plain = wrapped(outer_frequency=2, **FULL)
    for mode, first, second in ((True, model, optimizer), (False, expected, plain)):
        train_steps(first, second, range(steps))
        with torch.inference_mode(mode):
            second.average_parameters()
            second.load_state_dict(second.state_dict())
            first(torch.ones(2, WIDTH, dtype=DOUBLE))
        train_steps(first, second, range(steps, 8))
        with torch.inference_mode(mode):
            second.average_parameters()
        train_steps(first, second, range(8, 11))
    assert_equal(model, expected)


def test_buffers_become_rank_0s_with_the_average() -> None:
    for told in (True, False):
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, WIDTH)).double()
        optimizer = co2.DistributedOptimizer(sgd(model.parameters()), model, broadcast_buffers=told)
        train_steps(model, optimizer, range(2))
        optimizer.average_parameters()
        means = [tuple(values) for values in co2.allgather_object(model[1].running_mean.tolist())]
        assert len(set(means)) == (1 if told else co2.size())


def test_a_group_averages_gradients_in_every_step() -> None:
    size = co2.size()
    group = 2 if size % 2 == 0 else 1
    model, optimizer = wrapped(sgd, outer_frequency=2, nprocs_per_node=group, **FULL)
    simulation = Simulation(
        small_model(), sgd, size // group, frequency=2, lr=0.8, momentum=0.5, clip=0.02, penalty=True
    )
    for step in range(7):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(
            lambda m, worker, step=step: sum(loss_of(m, worker * group + i, step) for i in range(group)) / group
        )
    expected = simulation.workers[co2.rank() // group][0]
    assert_equal(model, expected, 1e-12)
    norm = optimizer.clip_grad_norm_(1.0)
    mates = [
        other for rank, other in enumerate(co2.allgather_object(float(norm))) if rank // group == co2.rank() // group
    ]
    assert len(set(mates)) == 1


def test_the_gap_is_that_of_whole_parameters() -> None:
    """Each rank knows of its own shards only how far they moved; in some rounds not as far as in the longest one."""
    rule = {**FULL, "outer_clip": None}
    model, optimizer = wrapped(sgd, outer_frequency=2, **rule)
    simulation = Simulation(small_model(), sgd, co2.size(), frequency=2, lr=0.8, momentum=0.5, clip=None, penalty=True)
    for step in range(20):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
    assert_equal(model, simulation.workers[co2.rank()][0], 1e-12)
    assert sum(1.01 < gap < 1.99 for gap in simulation.gaps) > 2, simulation.gaps


@pytest.mark.parametrize("group", [None, 1, 2])
def test_optimizers_in_groups_that_were_dropped_leave_their_channels_to_others(group: int | None) -> None:
    if co2.size() % (group or 1):
        return
    session, counts = current(), []
    for _ in range(4):
        model, optimizer = wrapped(sgd, outer_frequency=2, nprocs_per_node=group)
        train_steps(model, optimizer, range(3))
        optimizer.average_parameters()
        assert optimizer._comm is not optimizer._everyone
        counts.append((len(session.channels), len(session._adopted)))
        del model, optimizer
        gc.collect()
        co2.barrier()
    assert counts[1:] == counts[:1] * 3


def test_the_front_door_and_what_it_refuses() -> None:
    model = small_model()
    optimizer = dear.DistributedOptimizer(sgd(model.parameters()), model, strategy="co2", outer_frequency=4)
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
            wrapped(**arguments)
    with pytest.raises(ValueError, match="'co2' has nothing to tune"):
        dear.DistributedOptimizer(sgd(model.parameters()), model, strategy="co2", tune=True)


def test_ranks_that_disagree_are_told() -> None:
    if co2.size() == 1:
        return
    with pytest.raises(ValueError, match=r"«outer_frequency=3» on rank 0 and «outer_frequency=5» on rank"):
        wrapped(outer_frequency=3 if co2.rank() == 0 else 5)
    model, optimizer = wrapped(outer_frequency=4)
    train_steps(model, optimizer, range(4 if co2.rank() == 0 else 3))
    with pytest.raises(RuntimeError, match="rank 0 has made 1 and rank 1 0: every rank should make the same number"):
        optimizer.average_parameters()
    if co2.rank() > 0:
        train_steps(model, optimizer, range(3, 4))
    optimizer.average_parameters()
    if co2.rank() > 0:
        loss_of(model, co2.rank(), 9).backward()
    with pytest.raises(RuntimeError, match=r"gradients wait for step.* on rank 1"):
        optimizer.average_parameters()
    optimizer.zero_grad()


@pytest.mark.parametrize("steps", [2, 3])
def test_one_rank_may_end_a_round_ahead(steps: int) -> None:
    """As at shutdown(): who is behind, in the middle of a round or at its end, sends the round that the others wait for."""
    model, optimizer = wrapped(outer_frequency=2)
    train_steps(model, optimizer, range(4 if co2.rank() == 0 else steps))
    before = [value.clone() for value in model.parameters()]
    current().services["co2"].close()
    assert set(co2.allgather_object(optimizer.rounds.events)) == {2}
    assert all(torch.equal(value, kept) for value, kept in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("unfrozen", [True, False])
def test_a_rank_that_has_made_no_step_sends_the_round_of_others(unfrozen: bool) -> None:
    """And one that has not come to where others trained a layer for the first time."""
    model, optimizer = wrapped(outer_frequency=2)
    if unfrozen:
        model[0].requires_grad_(False)
        train_steps(model, optimizer, range(3))
    if co2.rank() == 0:
        model[0].requires_grad_(True)
        train_steps(model, optimizer, range(3, 4 if unfrozen else 5))
    current().services["co2"].close()
    standings = co2.allgather_object(optimizer.rounds.standing)
    assert len(set(standings)) == 1
    assert standings[0].sent == (2 if unfrozen else 1)


def test_a_model_wrapped_again_belongs_to_the_new_optimizer() -> None:
    model, first = wrapped(outer_frequency=1)
    train_steps(model, first, range(2))
    second = co2.DistributedOptimizer(sgd(model.parameters()), model, outer_frequency=1)
    assert first.rounds.parts == []
    train_steps(model, second, range(2))
    loss_of(model, co2.rank(), 2).backward()
    with pytest.raises(RuntimeError, match="went to a DistributedOptimizer that was made later"):
        first.step()
    second.zero_grad()


def test_a_model_wrapped_again_one_step_apart_is_not_waited_for() -> None:
    model, first = wrapped(outer_frequency=2)
    train_steps(model, first, range(4 if co2.rank() == 0 else 3))
    second = co2.DistributedOptimizer(sgd(model.parameters()), model, outer_frequency=2)
    assert first.rounds.parts == []
    assert equal_everywhere(model)
    train_steps(model, second, range(4))
    second.average_parameters()
    assert equal_everywhere(model)


def test_a_model_converted_after_its_first_step_is_refused() -> None:
    model, optimizer = wrapped(outer_frequency=2)
    train_steps(model, optimizer, range(1))
    model.float()
    with pytest.raises(RuntimeError, match=r"was torch\.float64 when co2 took it in and is torch\.float32"):
        optimizer.step()
