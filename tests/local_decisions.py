"""Scripts of two ranks, of which one knows what the other does not. In each rank: ``python -m tests.local_decisions NAME``.

A script trains with every synchronous strategy in turn and compares with one process, or raises what it promises to raise.
Who comes to the end prints a line; who does not has shown the defect.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import dear
from overlap.session import current

STRATEGIES = ("dear", "wfbp", "mgwfbp", "bytescheduler_adapter", "oss")
SHARDED = ("dear", "oss")
WIDTH = 6
Scenario = Callable[[str], None]
SCENARIOS: dict[str, tuple[Scenario, tuple[str, ...]]] = {}


def scenario(*strategies: str) -> Callable[[Scenario], Scenario]:
    """Make the function a script, run with each of `strategies` (all, if there is none)."""

    def note(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = (function, strategies or STRATEGIES)
        return function

    return note


def _model(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).double()


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)).square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def _wrapped(strategy: str, model: nn.Module, **options: Any) -> Any:
    return dear.DistributedOptimizer(_sgd(model), model, strategy=strategy, **options)


def _alone(steps: int, gradients: Callable[[nn.Module, int], None], max_norm: float | None = None) -> nn.Sequential:
    """One process: `gradients` leaves the averaged ones of a step in ``.grad``."""
    model = _model()
    optimizer = _sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        gradients(model, step)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


def _is(model: nn.Module, expected: nn.Module) -> None:
    for (name, value), wanted in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def _replicas_are_equal(model: nn.Module) -> None:
    flat = torch.cat([value.detach().flatten() for value in model.state_dict().values()])
    first, *others = dear.allgather_object(flat)
    assert all(torch.equal(first, other) for other in others), "replicas are apart"


@contextlib.contextmanager
def _raises_everywhere(*words: str) -> Iterator[None]:
    """What is inside raises on every rank, and names all `words`."""
    said = ""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        said = str(error)
    for text in dear.allgather_object(said):
        assert text, "every rank should raise"
        assert all(word in text for word in words), f"{text!r} should name {words}"


@scenario()
def synchronize_without_a_batch(strategy: str) -> None:
    """Horovod's clipping recipe, where one rank has no batch once and drops with ``model.zero_grad()``."""
    model = _model()
    optimizer = _wrapped(strategy, model)
    for step in range(4):
        if not (step == 1 and dear.rank() == 1):
            _loss(model, dear.rank(), step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        model.zero_grad()

    def gradients(alone: nn.Module, step: int) -> None:
        for rank in range(1 if step == 1 else 2):
            (_loss(alone, rank, step) / 2).backward()

    _replicas_are_equal(model)
    _is(model, _alone(4, gradients, 0.5))


def _frozen_differently(strategy: str, after: int) -> None:
    """Each rank trains a layer of its own: the union trains everywhere, or all ranks raise with the names."""
    model = _model()
    model[:2].requires_grad_(False)
    said, optimizer = "", None
    try:
        for step in range(4):
            if step == after:
                model[dear.rank()].requires_grad_(True)
            optimizer = optimizer or _wrapped(strategy, model)
            optimizer.zero_grad()
            _loss(model, dear.rank(), step).backward()
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
            (_loss(alone, rank, step) / 2).backward()

    _replicas_are_equal(model)
    _is(model, _alone(4, gradients))


@scenario()
def frozen_differently_at_wrapping(strategy: str) -> None:
    _frozen_differently(strategy, 0)


@scenario()
def frozen_differently_later(strategy: str) -> None:
    """Frozen on both ranks at first."""
    _frozen_differently(strategy, 2)


@scenario()
def writing_through_state_dict(strategy: str) -> None:
    model = _model()
    optimizer = _wrapped(strategy, model)
    for step in range(2):
        optimizer.zero_grad()
        _loss(model, dear.rank(), step).backward()
        optimizer.step()
    own = model.state_dict()
    with torch.no_grad():
        own["1.weight"].copy_(torch.full((WIDTH, WIDTH), 0.25))
    assert bool((model[1].weight == 0.25).all()), "what was written is lost"


@scenario()
def tied_weights_are_saved_once(strategy: str) -> None:
    def size(model: nn.Module) -> int:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        return len(file.getvalue())

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).double()
    model[1].weight = model[0].weight
    before = size(model)
    optimizer = _wrapped(strategy, model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 64, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    assert size(model) < 1.2 * before, f"{before} bytes have become {size(model)}"


@scenario()
def gradients_that_no_hook_saw(strategy: str) -> None:
    """``p.grad = torch.autograd.grad(…)``, then ``synchronize()``, clip and step."""
    model = _model()
    optimizer = _wrapped(strategy, model)
    for step in range(4):
        optimizer.zero_grad()
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(_loss(model, dear.rank(), step), params), strict=True):
            param.grad = grad
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()

    def gradients(alone: nn.Module, step: int) -> None:
        for rank in range(2):
            (_loss(alone, rank, step) / 2).backward()

    _is(model, _alone(4, gradients, 0.05))


@scenario("dear")
def a_question_before_its_reader_is_there(strategy: str) -> None:
    """A rank wraps faster than the other and asks at once: the letter waits for whoever is going to read it."""
    room = current().mailroom
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
    model, extra = _model(), _model(1)
    optimizer = _wrapped(strategy, model)
    whole = nn.Sequential(*model, *extra)

    def train(step: int) -> None:
        optimizer.zero_grad()
        with optimizer.no_sync():
            _loss(whole, dear.rank(), 2 * step).backward()
        _loss(whole, dear.rank(), 2 * step + 1).backward()
        optimizer.step()

    train(0)
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.01})
    for step in range(1, 4):
        train(step)
    _replicas_are_equal(whole)


@scenario()
def strides_that_differ(strategy: str) -> None:
    """Channels-last on rank 0 alone: elements would be mixed."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    if dear.rank() == 0:
        model = model.to(memory_format=torch.channels_last)
    with _raises_everywhere("0.weight", "stride"):
        _wrapped(strategy, model)


@scenario()
def thawed_and_frozen_again(strategy: str) -> None:
    """Between backward and ``step()``: torch steps whoever has a ``.grad``, and by the average of all ranks here."""
    model = _model()
    model[1].requires_grad_(False)
    optimizer = _wrapped(strategy, model)
    for step in range(4):
        optimizer.zero_grad()
        model[1].requires_grad_(step == 2)
        _loss(model, dear.rank(), step).backward()
        model[1].requires_grad_(False)
        optimizer.step()

    def gradients(alone: nn.Module, step: int) -> None:
        alone[1].requires_grad_(step == 2)
        for rank in range(2):
            (_loss(alone, rank, step) / 2).backward()
        alone[1].requires_grad_(False)

    _replicas_are_equal(model)
    _is(model, _alone(4, gradients))


@scenario("dear")
def a_cause_behind_shutdown(strategy: str) -> None:
    """``finally: dear.shutdown()``: the exception that ended training is shown; see the test, which expects no end here."""
    model = _model()
    optimizer = _wrapped(strategy, model)
    try:
        for step in range(100):
            optimizer.zero_grad()
            _loss(model, dear.rank(), step).backward()
            if step == 3 and dear.rank() == 1:
                raise LookupError("the one cause")
            optimizer.step()
    finally:
        dear.shutdown()


@scenario(*SHARDED)
def parameters_that_change_places(strategy: str) -> None:
    """``p.data, q.data = q.data, p.data`` with another model's parameter."""
    model, other = _model(), _model()
    with torch.no_grad():
        other[0].weight.fill_(0.5)
    optimizer = _wrapped(strategy, model)
    for step in range(2):
        optimizer.zero_grad()
        _loss(model, dear.rank(), step).backward()
        optimizer.step()
    optimizer.synchronize()
    p, q = model[0].weight, other[0].weight
    before = p.detach().clone()
    p.data, q.data = q.data, p.data
    optimizer.zero_grad()
    _loss(model, dear.rank(), 2).backward()
    optimizer.step()
    optimizer.synchronize()
    assert torch.equal(q, before), "the other model's parameter is ours still"


def _never_zeroed(strategy: str, max_norm: float | None) -> None:
    """Gradients that are never zeroed add up, as in one process."""
    model = _model()
    optimizer = _wrapped(strategy, model)
    for step in range(4):
        # In turn one rank uses the middle layer and the other does not.
        whole = model if step % 2 == dear.rank() else nn.Sequential(model[0], model[2])
        _loss(whole, dear.rank(), step).backward()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
    alone = _model()
    plain = _sgd(alone)
    for step in range(4):
        for rank in range(2):
            whole = alone if step % 2 == rank else nn.Sequential(alone[0], alone[2])
            (_loss(whole, rank, step) / 2).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
        plain.step()
    _is(model, alone)


@scenario("bytescheduler_adapter")
def unused_gradients_that_are_never_zeroed(strategy: str) -> None:
    _never_zeroed(strategy, None)


@scenario(*SHARDED)
def clipped_gradients_that_are_never_zeroed(strategy: str) -> None:
    _never_zeroed(strategy, 0.05)


@scenario()
def a_skip_that_sets_to_zero(strategy: str) -> None:
    """``model.zero_grad(set_to_none=False)`` drops the gradients, too."""
    model = _model()
    optimizer = _wrapped(strategy, model)
    for step in range(5):
        _loss(model, dear.rank(), step).backward()
        if step == 2:
            model.zero_grad(set_to_none=False)
            continue
        optimizer.step()
        model.zero_grad()

    alone = _model()
    plain = _sgd(alone)
    for step in (0, 1, 3, 4):
        plain.zero_grad()
        for rank in range(2):
            (_loss(alone, rank, step) / 2).backward()
        plain.step()
    _is(model, alone)


@scenario()
def a_closure_with_earlier_gradients_on_one_rank(strategy: str) -> None:
    """They are averaged with the closure's, or every rank raises and says what to do."""
    model = _model()
    optimizer = _wrapped(strategy, model)
    said = ""
    for step in range(3):
        optimizer.zero_grad()
        if step == 1 and dear.rank() == 1:
            _loss(model, 1, 50).backward()

        def closure(step: int = step) -> torch.Tensor:
            loss = _loss(model, dear.rank(), step)
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
            (_loss(alone, rank, step) / 2).backward()
        if step == 1:
            (_loss(alone, 1, 50) / 2).backward()

    _is(model, _alone(3, gradients))


def main(name: str) -> None:
    dear.init()
    run, strategies = SCENARIOS[name]
    for strategy in strategies:
        run(strategy)
    print(f"rank {dear.rank()} came to the end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
