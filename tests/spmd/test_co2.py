"""co2 is equal to its equations on one process, whoever waits for whom, also after a checkpoint."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

import co2
from overlap.job.session import current
from tests.spmd.co2_simulation import Simulation
from tests.spmd.co2_training import (
    FULL,
    adamw,
    assert_equal,
    assert_same,
    equal_everywhere,
    loss_of,
    momentum_sgd,
    small_model,
    train_steps,
    while_rank_0_stands_still,
    wrapped,
)
from tests.spmd.listening import heard


@pytest.mark.parametrize(
    ("make", "frequency", "rule"),
    [
        (momentum_sgd, 1, {"outer_lr": 1.0, "outer_momentum": 0.0, "outer_clip": None, "gap_penalty": False}),
        (momentum_sgd, 3, {"outer_lr": 1.0, "outer_momentum": 0.0, "outer_clip": None, "gap_penalty": 1.5}),
        (momentum_sgd, 3, FULL),
        (adamw, 3, FULL),
    ],
    ids=["delayed", "constant-gap", "full", "full-adamw"],
)
def test_equals_its_equations_on_one_process(make: Any, frequency: int, rule: dict[str, Any]) -> None:
    model, optimizer = wrapped(make, outer_frequency=frequency, **rule)
    simulation = Simulation(
        small_model(),
        make,
        co2.size(),
        frequency=frequency,
        lr=rule["outer_lr"],
        momentum=rule["outer_momentum"],
        clip=rule["outer_clip"],
        penalty=rule["gap_penalty"],
    )
    measured_gap = rule["gap_penalty"] is True
    for step in range(14):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
        assert_same(model, simulation.workers[co2.rank()][0], measured_gap=measured_gap)
        assert optimizer.local_steps == simulation.in_round
        if step == 10:
            optimizer.average_parameters()
            simulation.average()
            assert_same(model, simulation.workers[0][0], measured_gap=measured_gap)
            assert equal_everywhere(model)
    if measured_gap:
        assert len(set(simulation.gaps)) > 1, "the gap should vary"


def test_the_average_of_a_first_round_is_the_mean_of_the_ranks() -> None:
    model, optimizer = wrapped(outer_frequency=100, **FULL)
    train_steps(model, optimizer, range(3))
    local = [value.clone() for value in model.state_dict().values()]
    columns = zip(*co2.allgather_object(local), strict=True)
    optimizer.average_parameters()
    for value, column in zip(model.state_dict().values(), columns, strict=True):
        torch.testing.assert_close(value, sum(column) / co2.size(), rtol=1e-14, atol=1e-15)
    assert equal_everywhere(model)


def test_warm_up_with_sgd_is_synchronous_training() -> None:
    model, optimizer = wrapped(warmup_steps=5, **FULL)
    expected = small_model()
    plain = momentum_sgd(expected.parameters())
    train_steps(model, optimizer, range(4))
    losses = []

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        losses.append(loss_of(model, co2.rank(), 4))
        losses[0].backward()
        return losses[0]

    assert optimizer.step(evaluate) is losses[0], "the rank's own"
    for step in range(5):
        plain.zero_grad()
        sum(loss_of(expected, rank, step) / co2.size() for rank in range(co2.size())).backward()
        plain.step()
    assert_equal(model, expected, 1e-12)
    assert optimizer.local_steps == 0


def test_no_rank_waits_for_a_round_before_the_next_has_ended() -> None:
    """The others go through a whole round, and the first step of one more, while one rank does not do anything."""
    model, optimizer = wrapped(outer_frequency=3, **FULL)
    train_steps(model, optimizer, range(3))
    while_rank_0_stands_still(lambda: train_steps(model, optimizer, range(3, 5)))
    train_steps(model, optimizer, range(5, 6))


def test_whoever_has_to_wait_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = wrapped(outer_frequency=1, **FULL)
    rounds, awaited = optimizer.rounds, threading.Semaphore(0)
    carry, arrive = rounds._communication.carry, rounds.arrive

    def carry_when_awaited(*arguments: Any) -> None:
        assert awaited.acquire(timeout=30)
        carry(*arguments)

    def arrive_late(**options: Any) -> None:
        threading.Timer(0.02, awaited.release).start()
        arrive(**options)

    monkeypatch.setattr("co2.pace._WORTH_SAYING", 0.0)
    rounds._communication.carry, rounds.arrive = carry_when_awaited, arrive_late
    with heard(logging.WARNING) as said:
        train_steps(model, optimizer, range(4))
    assert ["a larger outer_frequency hides it" in text for text in said].count(True) == 1
    rounds.arrive()  # the last one is on its way still


def test_rank_0_alone_saves_while_others_go_on() -> None:
    """They have sent one round more by then, and answer with where they were before."""
    ahead, peer_queries = threading.Semaphore(0), current().peer_queries
    peer_queries.on("test/ahead", lambda _sender, _news: ahead.release())
    co2.barrier()
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    simulation = Simulation(
        small_model(), momentum_sgd, co2.size(), frequency=2, lr=0.8, momentum=0.5, clip=0.02, penalty=True
    )
    saved = None
    for step in range(9):
        train_steps(model, optimizer, range(step, step + 1))
        if step <= 6:
            simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
        if step == 6 and co2.rank() == 0:
            assert all(ahead.acquire(timeout=30) for _ in range(1, co2.size()))
            saved = optimizer.state_dict()
        if step == 7 and co2.rank() > 0:
            peer_queries.tell(0, "test/ahead")
    if saved is not None:
        section = saved["co2"]
        assert (section["steps"], section["in_round"], section["events"]) == (7, 1, 3)
        for index, vectors in section["parameters"].items():
            wanted = {"start": simulation.start, "next": simulation.next, "momentum": simulation.m}
            for name, values in wanted.items():
                torch.testing.assert_close(vectors[name], values[index], rtol=1e-12, atol=1e-12)
        plain = momentum_sgd(small_model().parameters())
        plain.load_state_dict(saved)  # the section is passed over
        assert plain.state_dict()["state"].keys() == saved["state"].keys()


def test_each_rank_holds_its_share_of_the_outer_state() -> None:
    model, optimizer = wrapped(outer_frequency=1, **FULL)
    train_steps(model, optimizer, range(3))
    total = sum(param.numel() for param in model.parameters())
    for part in optimizer.rounds.parts:
        assert part.momentum.numel() == part.start.numel() == part.whole.numel() // co2.size()
    held = sum(part.momentum.numel() for part in optimizer.rounds.parts)
    assert total / co2.size() <= held < total / co2.size() + 8 * 4 * (1 + 1)  # aligned to 64 bytes


def test_a_checkpoint_without_outer_state_begins_a_round() -> None:
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    train_steps(model, optimizer, range(5))
    fresh, plain = small_model(), momentum_sgd(small_model().parameters())
    optimizer.load_state_dict(plain.state_dict())
    model.load_state_dict(fresh.state_dict())
    train_steps(model, optimizer, range(6))
    other, fresh_optimizer = wrapped(outer_frequency=2, **FULL)
    train_steps(other, fresh_optimizer, range(6))
    assert_equal(model, other)


def test_outer_state_of_another_model_is_refused() -> None:
    model, optimizer = wrapped(outer_frequency=1, **FULL)
    train_steps(model, optimizer, range(2))
    saved = optimizer.state_dict()
    saved["co2"]["parameters"][0] = {name: torch.zeros(2, 3) for name in ("start", "next", "momentum")}
    with pytest.raises(ValueError, match=r"parameter 0 has shape \(2, 3\), and the optimizer's parameter \(16, 9\)"):
        optimizer.load_state_dict(saved)


def test_gradients_of_a_rank_by_itself_stay_where_backward_left_them() -> None:
    model = small_model()
    came: dict[torch.nn.Parameter, int] = {}

    def note(param: torch.nn.Parameter) -> None:
        assert param.grad is not None
        came[param] = param.grad.data_ptr()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(note)  # before the optimizer's
    optimizer = co2.DistributedOptimizer(momentum_sgd(model.parameters()), model, nprocs_per_node=1)
    for step in range(3):  # buckets are made in the first one
        optimizer.zero_grad()
        loss_of(model, co2.rank(), step).backward()
        assert came
        assert all(param.grad is not None and param.grad.data_ptr() == place for param, place in came.items())
        optimizer.step()


def test_a_frequency_is_suggested_from_what_all_ranks_have_measured() -> None:
    model, optimizer = wrapped(outer_frequency=2)
    with pytest.raises(RuntimeError, match="rank 0 has measured fewer than 3 rounds"):
        co2.suggest_frequency(model)
    with pytest.raises(RuntimeError, match="there is nothing to explain yet: of 3 rounds, 0 are measured"):
        optimizer.explain()
    train_steps(model, optimizer, range(8))
    assert co2.suggest_frequency(model) >= 1
    assert "outer_frequency=" in optimizer.explain() or "would do" in optimizer.explain()
    for _ in range(9):  # a fast rank, and a slow network to the last one
        optimizer.rounds.pace.stepped(0.01 if co2.rank() == 0 else 0.02)
        optimizer.rounds.pace.exchanged(0.03 + 0.02 * co2.rank(), 0)
    assert co2.suggest_frequency(model) == 3 + 2 * (co2.size() - 1)
    _, waits = wrapped(outer="localsgd")
    with pytest.raises(RuntimeError, match="with outer='localsgd' every round waits"):
        waits.explain()
    with pytest.raises(ValueError, match="outer='localsgd' waits for the exchange"):
        co2.suggest_frequency(_)
    with pytest.raises(RuntimeError, match="no co2 optimizer trains this model"):
        co2.suggest_frequency(small_model())
