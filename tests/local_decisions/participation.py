"""Who takes part in a round, with what."""

from __future__ import annotations

import time

import torch
from torch import nn

import dear
from overlap.job.session import current
from tests.local_decisions.scenario import (
    assert_equal,
    assert_replicas_equal,
    loss_of,
    make_model,
    raises_everywhere,
    scenario,
    sgd,
    train_alone,
    wrap,
)


@scenario()
def synchronize_without_a_batch(strategy: str) -> None:
    """Horovod's clipping recipe, where one rank has no batch once and drops with ``model.zero_grad()``."""
    model = make_model()
    optimizer = wrap(strategy, model)
    for step in range(4):
        if not (step == 1 and dear.rank() == 1):
            loss_of(model, dear.rank(), step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        model.zero_grad()

    def gradients(alone: nn.Module, step: int) -> None:
        for rank in range(1 if step == 1 else 2):
            (loss_of(alone, rank, step) / 2).backward()

    assert_replicas_equal(model)
    assert_equal(model, train_alone(4, gradients, 0.5))


def _frozen_differently(strategy: str, after: int) -> None:
    """Each rank trains a layer of its own: the union trains everywhere, or all ranks raise with the names."""
    model = make_model()
    model[:2].requires_grad_(False)
    said, optimizer = "", None
    try:
        for step in range(4):
            if step == after:
                model[dear.rank()].requires_grad_(True)
            optimizer = optimizer or wrap(strategy, model)
            optimizer.zero_grad()
            loss_of(model, dear.rank(), step).backward()
            optimizer.step()
    except (RuntimeError, ValueError) as error:
        said = str(error)
    heard = dear.allgather_object(said)
    if any(heard):
        assert all("0.weight" in text or "1.weight" in text for text in heard), heard
        return

    def gradients(alone: nn.Module, step: int) -> None:
        for rank in range(2):
            for layer in (0, 1):
                alone[layer].requires_grad_(step >= after and layer == rank)
            (loss_of(alone, rank, step) / 2).backward()

    assert_replicas_equal(model)
    assert_equal(model, train_alone(4, gradients))


@scenario()
def frozen_differently_at_wrapping(strategy: str) -> None:
    _frozen_differently(strategy, 0)


@scenario()
def frozen_differently_later(strategy: str) -> None:
    """Frozen on both ranks at first."""
    _frozen_differently(strategy, 2)


@scenario("co2")
def averaged_parameters_that_differ(strategy: str) -> None:
    """Each rank thaws a layer of its own between two averages of parameters: no average mixes them."""
    model = make_model()
    model[:2].requires_grad_(False)
    optimizer = wrap(strategy, model, outer_frequency=2, nprocs_per_node=1)
    with raises_everywhere("trained in this round", "0.weight", "1.weight"):
        for step in range(8):
            if step == 3:
                model[dear.rank()].requires_grad_(True)
            optimizer.zero_grad()
            loss_of(model, dear.rank(), step).backward()
            optimizer.step()


@scenario()
def gradients_that_no_hook_saw(strategy: str) -> None:
    """``p.grad = torch.autograd.grad(…)``, then ``synchronize()``, clip and step."""
    model = make_model()
    optimizer = wrap(strategy, model)
    for step in range(4):
        optimizer.zero_grad()
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss_of(model, dear.rank(), step), params), strict=True):
            param.grad = grad
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()

    def gradients(alone: nn.Module, step: int) -> None:
        for rank in range(2):
            (loss_of(alone, rank, step) / 2).backward()

    assert_equal(model, train_alone(4, gradients, 0.05))


@scenario("dear")
def a_question_before_its_reader_is_there(strategy: str) -> None:
    """A rank wraps faster than the other and asks at once: the letter waits for whoever is going to read it."""
    room = current().peer_queries
    dear.barrier()
    if dear.rank() == 0:
        answer = room.ask(1, "test/late", 7)
        dear.barrier()
        assert room.wait(answer, 1, "test/late", 5.0) == 14
    else:
        dear.barrier()
        time.sleep(0.2)  # the question is here by now
        room.on("test/late", lambda _sender, question: 2 * question)
    dear.barrier()


@scenario()
def a_group_added_before_accumulation(strategy: str) -> None:
    """``add_param_group()``, then ``no_sync()``: no gradient was changed by anybody."""
    model, extra = make_model(), make_model(1)
    optimizer = wrap(strategy, model)
    whole = nn.Sequential(*model, *extra)

    def train(step: int) -> None:
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(whole, dear.rank(), 2 * step).backward()
        loss_of(whole, dear.rank(), 2 * step + 1).backward()
        optimizer.step()

    train(0)
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.01})
    for step in range(1, 4):
        train(step)
    assert_replicas_equal(whole)


@scenario()
def thawed_and_frozen_again(strategy: str) -> None:
    """Between backward and ``step()``: torch steps whoever has a ``.grad``, and by the average of all ranks here."""
    model = make_model()
    model[1].requires_grad_(False)
    optimizer = wrap(strategy, model)
    for step in range(4):
        optimizer.zero_grad()
        model[1].requires_grad_(step == 2)
        loss_of(model, dear.rank(), step).backward()
        model[1].requires_grad_(False)
        optimizer.step()

    def gradients(alone: nn.Module, step: int) -> None:
        alone[1].requires_grad_(step == 2)
        for rank in range(2):
            (loss_of(alone, rank, step) / 2).backward()
        alone[1].requires_grad_(False)

    assert_replicas_equal(model)
    assert_equal(model, train_alone(4, gradients))


@scenario("dear")
def a_cause_behind_shutdown(strategy: str) -> None:
    """``finally: dear.shutdown()``: the exception that ended training is shown; see the test, which expects no end here."""
    model = make_model()
    optimizer = wrap(strategy, model)
    try:
        for step in range(100):
            optimizer.zero_grad()
            loss_of(model, dear.rank(), step).backward()
            if step == 3 and dear.rank() == 1:
                raise LookupError("the one cause")
            optimizer.step()
    finally:
        dear.shutdown()


@scenario()
def a_skip_that_sets_to_zero(strategy: str) -> None:
    """``model.zero_grad(set_to_none=False)`` drops the gradients, too."""
    model = make_model()
    optimizer = wrap(strategy, model)
    for step in range(5):
        loss_of(model, dear.rank(), step).backward()
        if step == 2:
            model.zero_grad(set_to_none=False)
            continue
        optimizer.step()
        model.zero_grad()

    alone = make_model()
    plain = sgd(alone)
    for step in (0, 1, 3, 4):
        plain.zero_grad()
        for rank in range(2):
            (loss_of(alone, rank, step) / 2).backward()
        plain.step()
    assert_equal(model, alone)


@scenario()
def a_closure_with_earlier_gradients_on_one_rank(strategy: str) -> None:
    """They are averaged with the closure's, or every rank raises and says what to do."""
    model = make_model()
    optimizer = wrap(strategy, model)
    said = ""
    for step in range(3):
        optimizer.zero_grad()
        if step == 1 and dear.rank() == 1:
            loss_of(model, 1, 50).backward()

        def closure(step: int = step) -> torch.Tensor:
            loss = loss_of(model, dear.rank(), step)
            loss.backward()
            return loss

        try:
            optimizer.step(closure)
        except (RuntimeError, ValueError) as error:
            said = str(error)
            break
    heard = dear.allgather_object(said)
    if any(heard):
        assert all("closure" in text for text in heard), heard
        return

    def gradients(alone: nn.Module, step: int) -> None:
        for rank in range(2):
            (loss_of(alone, rank, step) / 2).backward()
        if step == 1:
            (loss_of(alone, 1, 50) / 2).backward()

    assert_equal(model, train_alone(3, gradients))
