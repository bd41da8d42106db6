"""Ranks out of data: averages are over those that are left, as in a simulation of all workers in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import co2
from overlap.features.join import CannotJoin, joined_ranks_of
from overlap.job.session import current
from overlap.transport.operation import barrier
from tests.spmd.co2_simulated_rules import (
    STREAMING,
    STREAMING_CASES,
    Halves,
    Sparse,
    simulation_of,
    streaming_simulation,
)
from tests.spmd.co2_simulation import Simulation
from tests.spmd.co2_training import (
    FULL,
    PLAIN,
    PLAIN_SIMULATED,
    assert_equal,
    assert_same,
    equal_everywhere,
    loss_of,
    momentum_sgd,
    sgd,
    small_model,
    train_steps,
    wrapped,
)
from tests.spmd.uneven_training import end_of_a_failed_join

pytestmark = pytest.mark.four_ranks

STEPS = 12  # of the rank that has most
AFTER = 4


def _lower_first(rank: int) -> int:
    """Rank 0 in the middle of a round."""
    return STEPS if rank == co2.size() - 1 else (7, 3, 8)[rank]


def _higher_first(rank: int) -> int:
    """Some between two rounds."""
    return (STEPS, 3, 10, 7)[rank]


def _none_at_first(rank: int) -> int:
    """The last rank has no data at all, but for what follows."""
    return STEPS if rank == 0 else 0 if rank == co2.size() - 1 else 4


class _Acco(Halves):
    """As the others."""

    def __init__(self) -> None:
        super().__init__(momentum_sgd, 3)
        self.joined: set[int] = set()
        self.workers = [(self.model, self.optimizer)] * co2.size()

    def step(self, _loss: Any, number: int = 0) -> None:
        super().step(number, tuple(self.joined))


def _co2() -> Simulation:
    rule = {"lr": 0.8, "momentum": 0.5, "clip": 0.02, "penalty": True}
    return Simulation(small_model(), momentum_sgd, co2.size(), frequency=3, **rule)


def _sparse() -> Simulation:
    options = {"top_k": 300, "bits": 2, "overlap": 2, "frequency": 3, "lr": 0.9}
    return Sparse(small_model(), momentum_sgd, co2.size(), **options)


def _streaming() -> Simulation:
    return streaming_simulation(momentum_sgd, 4, CASE)


CASE = {**STREAMING_CASES["two fragments"], "outer_frequency": 6}
RULES: dict[str, tuple[dict[str, Any], Callable[[], Any], Callable[[int], int]]] = {
    "co2": ({"outer_frequency": 3, **FULL}, _co2, _lower_first),
    "localsgd": ({}, lambda: simulation_of("localsgd", momentum_sgd, co2.size()), _none_at_first),
    "slowmo": ({}, lambda: simulation_of("slowmo", momentum_sgd, co2.size()), _lower_first),
    "diloco": ({}, lambda: simulation_of("diloco", momentum_sgd, co2.size()), _higher_first),
    "eager": ({}, lambda: simulation_of("eager", momentum_sgd, co2.size()), _higher_first),
    "streaming-diloco": ({**STREAMING, **CASE, "bits": 4}, _streaming, _higher_first),
    "sparseloco": ({"outer_lr": 0.9, "top_k": 300, "overlap_steps": 2}, _sparse, _higher_first),
    "acco": ({}, _Acco, _lower_first),
}


def _rate(step: int) -> float:
    return 0.1 * 0.9**step


def _train(model: Any, optimizer: Any, simulation: Any, steps: range) -> None:
    """With a rate that falls, on this rank and in the simulation."""
    for step in steps:
        for each in (optimizer, *(one for _, one in simulation.workers)):
            each.param_groups[0]["lr"] = _rate(step)
        train_steps(model, optimizer, range(step, step + 1))
        _simulate(simulation, step)
        _agree(model, simulation)


def _simulate(simulation: Any, step: int) -> None:
    for _, one in simulation.workers:
        one.param_groups[0]["lr"] = _rate(step)
    options = {"number": step} if isinstance(simulation, _Acco) else {}
    simulation.step(lambda m, worker: loss_of(m, worker, step), **options)


def _agree(model: Any, simulation: Any) -> None:
    if isinstance(simulation, _Acco):
        assert_equal(model, simulation.model, 1e-12)
    else:
        assert_same(model, simulation.workers[co2.rank()][0])


@pytest.mark.parametrize("rule", list(RULES))
def test_averages_are_over_those_that_are_left(rule: str) -> None:
    arguments, simulate, amount = RULES[rule]
    model, optimizer = wrapped(**{"outer": rule, "outer_frequency": 3, **arguments})
    simulation = simulate()
    for step in range(STEPS):
        simulation.joined = {rank for rank in range(co2.size()) if amount(rank) <= step}
        if step < amount(co2.rank()):
            _train(model, optimizer, simulation, range(step, step + 1))
        else:
            _simulate(simulation, step)
        if step == STEPS - 2 and step < amount(co2.rank()):
            saved = optimizer.state_dict()["co2"]  # from others' shares, too, some of which have joined
            assert saved["steps"] == STEPS - 1
            if rule in ("co2", "localsgd", "slowmo", "diloco"):
                for index, value in enumerate(simulation.next):
                    torch.testing.assert_close(saved["parameters"][index]["next"], value, rtol=1e-12, atol=1e-12)
    co2.join()
    _agree(model, simulation)
    simulation.joined = set()
    _train(model, optimizer, simulation, range(STEPS, STEPS + AFTER))
    optimizer.average_parameters()
    simulation.average()
    _agree(model, simulation)
    assert equal_everywhere(model)


def test_joining_together_leaves_everything_as_it_is() -> None:
    """In the middle of a round, which some have come farther in than others, and with a round on its way."""
    model, optimizer = wrapped(outer_frequency=3, **FULL)
    simulation = _co2()
    for steps in (range(2), range(2, 5), range(5, 11)):
        _train(model, optimizer, simulation, steps)
        co2.join()
    train_steps(model, optimizer, range(11, 12 + (co2.rank() == 0)))
    before = [value.clone() for value in model.parameters()]
    co2.join()
    assert all(torch.equal(value, kept) for value, kept in zip(model.parameters(), before, strict=True))
    assert optimizer.local_steps == (co2.rank() == 0)
    assert set(co2.allgather_object(optimizer.rounds.events)) == {4}
    optimizer.average_parameters()
    assert equal_everywhere(model)


def test_a_rank_joins_in_warm_up() -> None:
    model, optimizer = wrapped(sgd, outer="diloco", outer_frequency=3, warmup_steps=4)
    simulation = simulation_of("diloco", sgd, co2.size())
    for step in range(10):
        simulation.joined = {rank for rank in range(1, co2.size()) if step >= 2 * rank - 1}
        if co2.rank() not in simulation.joined:
            train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
        if step < 4:
            simulation.average()
    co2.join()
    assert_same(model, simulation.workers[co2.rank()][0])
    assert set(co2.allgather_object(optimizer.rounds.steps)) == {10}


def test_several_optimizers() -> None:
    """Whose rounds end at different steps; one waits, the other does not."""
    model, first = wrapped(outer_frequency=2, **FULL)
    other, second = wrapped(outer="localsgd", outer_frequency=3)
    simulations = [_co2(), simulation_of("localsgd", momentum_sgd, co2.size())]
    simulations[0].frequency = 2
    for step in range(12):
        joined = {rank for rank in range(1, co2.size()) if step >= 3 * rank + 1}
        if co2.rank() not in joined:
            train_steps(model, first, range(step, step + 1))
            train_steps(other, second, range(step, step + 1))
        for simulation in simulations:
            simulation.joined = joined
            simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
    co2.join()
    assert_same(model, simulations[0].workers[co2.rank()][0])
    assert_same(other, simulations[1].workers[co2.rank()][0])


AMOUNTS = (12, 4, 5, 8)  # rank 1 in a round that rank 0 goes on with, and the other group one after the other


def _of_group(worker: int, step: int) -> list[int]:
    """Ranks of a group of two that have data."""
    return [rank for rank in (2 * worker, 2 * worker + 1) if step < AMOUNTS[rank]]


@pytest.mark.parametrize("rule", ["diloco", "eager", "acco"])
def test_a_rank_of_a_group_makes_its_groups_steps(rule: str) -> None:
    """A group is out of data when all of its ranks are; until then it counts as before."""
    if co2.size() % 2:
        return
    model, optimizer = wrapped(sgd, outer=rule, outer_frequency=3, nprocs_per_node=2)
    if rule == "acco":
        simulation: Any = _Groups()
    else:
        simulation = simulation_of(rule, sgd, co2.size() // 2)
    for step in range(12):
        groups = range(co2.size() // 2)
        simulation.joined = {worker for worker in groups if not _of_group(worker, step)}
        if step < AMOUNTS[co2.rank()]:
            train_steps(model, optimizer, range(step, step + 1))
        if rule == "acco":
            simulation.step(step)
        else:
            simulation.step(
                lambda m, worker, step=step: _mean_loss(m, _of_group(worker, step), step),
            )
    assert co2.join() == 0
    wanted = simulation.model if rule == "acco" else simulation.workers[co2.rank() // 2][0]
    for value, other in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-12)
    optimizer.average_parameters()
    assert equal_everywhere(model)


def _mean_loss(model: torch.nn.Module, ranks: list[int], step: int) -> torch.Tensor:
    return sum((loss_of(model, rank, step) for rank in ranks), torch.zeros(())) / len(ranks)


class _Groups(Halves):
    """Each rank has the average of its group's gradients."""

    def __init__(self) -> None:
        super().__init__(sgd, 3)

    def step(self, step: int, skip: Any = ()) -> None:
        for rank in range(co2.size()):
            ranks = _of_group(rank // 2, step)
            if ranks:
                loss = _mean_loss(self.model, ranks, step)
                gradients = torch.autograd.grad(loss, list(self.model.parameters()))
                self.sums[rank] = [a + b for a, b in zip(self.sums[rank], gradients, strict=True)]
                self.count += 1
        self.in_round += 1
        if self.in_round == self.frequency:
            self.turn()


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_plain_optimizer(nprocs: int) -> None:
    """Nobody makes its steps on a rank that is out of data, so that it contributes nothing even where its group goes on."""
    if co2.size() % nprocs:
        return
    model = co2.CO2DistributedDataParallel(small_model(), **{**PLAIN, "nprocs_per_node": nprocs})
    optimizer = sgd(model.parameters())
    simulation = Simulation(small_model(), sgd, co2.size(), **PLAIN_SIMULATED)

    def of_group(rank: int, step: int) -> list[int]:
        first = rank - rank % nprocs
        return [mate for mate in range(first, first + nprocs) if step < AMOUNTS[mate]]

    for step in range(12):
        simulation.joined = {rank for rank in range(co2.size()) if step >= AMOUNTS[rank]}
        if co2.rank() not in simulation.joined:
            loss_of(model, co2.rank(), step).backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            model.perform_co2(optimizer)
        simulation.step(lambda m, rank, step=step: _mean_loss(m, of_group(rank, step), step))
    assert co2.join() == 0
    assert_equal(model, simulation.workers[co2.rank()][0], 1e-12)
    model.average_parameters()
    assert equal_everywhere(model)


def test_a_layer_that_others_thaw_meanwhile_is_trained_here_too() -> None:
    model, optimizer = wrapped(outer="localsgd", outer_frequency=3)
    simulation = simulation_of("localsgd", momentum_sgd, co2.size())
    models = [model, *(one for one, _ in simulation.workers)]
    for one in models:
        one[0].requires_grad_(False)
    for step in range(12):
        simulation.joined = set(range(1, co2.size())) if step >= 4 else set()
        if step == 8:
            for one in models[1:] if co2.rank() in simulation.joined else models:
                one[0].requires_grad_(True)
        if co2.rank() not in simulation.joined:
            train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
    co2.join()
    assert all(param.requires_grad for param in model.parameters())
    assert_same(model, simulation.workers[co2.rank()][0])
    train_steps(model, optimizer, range(12, 15))
    assert equal_everywhere(model)


def test_ranks_that_learned_of_other_layers_are_told_so_where_they_join() -> None:
    """What was learned before counts once more, which needs the same layers."""
    if co2.size() == 1:
        return
    model, optimizer = wrapped(outer_frequency=3, **FULL)
    train_steps(model, optimizer, range(3))
    model[0].requires_grad_(co2.rank() == 0)
    train_steps(model, optimizer, range(3, 5))
    with pytest.raises(ValueError, match="parameters trained in this round differ between ranks"):  # noqa: PT012
        if co2.rank() == 0:
            train_steps(model, optimizer, range(5, 6))
            optimizer.rounds.arrive()
        co2.join()
    optimizer.rounds.retired = True  # it is of no use any more
    current().control.run(barrier())
    co2.join()


NEEDING: dict[str, Callable[[Any], Any]] = {
    "average_parameters()": lambda optimizer: optimizer.average_parameters(),
    "add_param_group()": lambda optimizer: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]}),
    "load_state_dict()": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", list(NEEDING))
def test_what_needs_every_rank_is_refused_everywhere(what: str, late: bool) -> None:
    """Also where others wait in it when a rank joins."""
    if co2.size() == 1 or (late and what == "load_state_dict()"):
        return
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    train_steps(model, optimizer, range(3))
    if co2.rank() == 1:
        if late:
            time.sleep(0.1)
        act: Callable[[], Any] = co2.join
    else:
        deadline = time.monotonic() + 20
        while not late and 1 not in joined_ranks_of(current()).joined(optimizer.rounds.following.topic):
            assert time.monotonic() < deadline
        act = lambda: NEEDING[what](optimizer)  # noqa: E731
    with pytest.raises(CannotJoin) as raised:
        act()
    assert f"{what} needs every rank, and ranks [1] have joined" in str(raised.value)
    end_of_a_failed_join()
    train_steps(model, optimizer, range(3, 6))
    optimizer.average_parameters()
    assert equal_everywhere(model)


@pytest.mark.parametrize("slow", [False, True])
def test_training_ends_while_a_rank_is_out_of_data(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at shutdown(), where the others did not call join(), and some end a round before others.

    `slow`: the others have ended the rounds of the rank that has joined before that has heard that it may.
    """
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    rounds = optimizer.rounds
    train_steps(model, optimizer, range(2))
    if co2.rank() == 1:
        rounds.following.keep_up(())  # as in join()
    else:
        train_steps(model, optimizer, range(2, 7 if co2.rank() == 0 else 5))
    if slow and co2.rank() == 1:
        finish = rounds.finish

        def finish_late(*arguments: Any) -> None:
            rounds.following._thread.join()
            finish(*arguments)

        monkeypatch.setattr(rounds, "finish", finish_late)
    current().services["co2"].close()
    assert set(co2.allgather_object(rounds.standing)) == {rounds.standing}
    assert rounds.events == 3
