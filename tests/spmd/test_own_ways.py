"""Scripts that do more with gradients and updates than call step(): as in one process, or a clear error."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import bytescheduler_adapter
import dear
import mgwfbp
from overlap.core.round import GradientChanged
from tests.spmd.models import MODELS
from tests.spmd.one_process import SGD, WAYS, as_in_one_process, loss_of, small_model, train
from tests.spmd.strategies import PACKAGES, WRAP


class Sam(SGD):
    """Sharpness-aware minimisation (Foret et al., 2021, algorithm 1), with its two steps as methods of their own."""

    @torch.no_grad()
    def first_step(self) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["old"] = param.clone()
            param.add_(param.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.copy_(self.state[param].pop("old"))
            param.sub_(param.grad, alpha=0.1)
        self.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_methods_of_the_optimizers_class_take_averages_or_raise(way: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            for number, update in enumerate((optimizer.first_step, optimizer.second_step)):
                loss_of(model, 2 * step + number, alone).backward()
                if not alone:
                    with pytest.raises(
                        RuntimeError, match=r"_step\(\) was called with gradients that are this rank's own"
                    ):
                        update()
                    optimizer.synchronize()
                update()

    as_in_one_process(way, script, Sam)


@pytest.mark.parametrize("strategy", WRAP)
def test_the_wrapped_optimizers_own_step_is_refused(strategy: str) -> None:
    """In a script that wraps its optimizer and does not keep the wrapper, from its first step on."""
    model = small_model()
    inner = SGD(model.parameters(), 0.1)
    optimizer = WRAP[strategy](inner, model)
    for step in range(2):
        loss_of(model, step, False).backward()
        with pytest.raises(RuntimeError, match=r"step\(\) of the SGD was called, .* DistributedOptimizer wraps it"):
            inner.step()
        optimizer.step()
        optimizer.zero_grad()


class Unknown(SGD):
    """SGD, of a type that nobody knows."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class SamByClosure(SGD):
    """The other common form: ``step(closure)`` perturbs by the gradients that were there, and evaluates again."""

    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        with torch.no_grad():
            old = [param.clone() for param in params]
            for param in params:
                param.add_(param.grad, alpha=0.05)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for param, value in zip(params, old, strict=True):
                param.copy_(value).sub_(param.grad, alpha=0.1)
        return loss


@pytest.mark.parametrize("way", WAYS)
def test_gradients_from_before_a_closure_are_averaged(way: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                loss = loss_of(model, step, alone)
                loss.backward()
                return loss

            closure()
            optimizer.step(closure)
            optimizer.zero_grad()

    as_in_one_process(way, script, SamByClosure)


@pytest.mark.parametrize("strategy", WRAP)
@pytest.mark.parametrize("promised", [False, True])
def test_who_promises_elementwise_gets_its_own_loss_from_closures(promised: bool, strategy: str) -> None:
    """As with SGD itself; a type that we do not know may decide by the loss, which is the same on all ranks then."""
    if strategy in ("dear-eager", "dear-host") and not promised:
        pytest.skip("eager=True and residency='host' refuse unknown types")
    model = small_model()
    optimizer = WRAP[strategy](Unknown(model.parameters(), 0.1), model, elementwise=promised)
    for step in range(2):
        losses = []

        def closure(step: int = step, losses: Any = losses) -> torch.Tensor:
            optimizer.zero_grad()
            losses.append(loss_of(model, step, False))
            losses[-1].backward()
            return losses[-1]

        returned = optimizer.step(closure)
        assert len(losses) == 1
        expected = losses[0] if promised else dear.allreduce(losses[0].detach())
        torch.testing.assert_close(returned, expected)


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_synchronize_where_only_one_rank_has_gradients(way: str, looks: bool, when: int) -> None:
    """All others clip by the average too, and take the same step. `looks`: their forward runs, without a backward."""

    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            optimizer.zero_grad()
            if step != when:
                loss_of(model, step, alone).backward()
            elif alone or dear.rank() == 0:
                x = torch.ones(2, 6, dtype=torch.float64)
                (model(x).square().sum() / (dear.size() if alone else 1)).backward()
            elif looks:
                model(torch.ones(2, 6, dtype=torch.float64))
            if not alone:
                optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with contextlib.nullcontext() if alone else optimizer.skip_synchronize():
                optimizer.step()
            if not alone:
                optimizer.synchronize()  # nothing to average: nobody waits

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", WAYS)
def test_a_window_that_ends_inside_no_sync_is_averaged_by_synchronize(way: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(3):
            optimizer.zero_grad()
            with contextlib.nullcontext() if alone else optimizer.no_sync():
                for part in range(2):
                    (loss_of(model, 2 * step + part, alone) / 2).backward()
            if not alone:
                with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match="local still: call synchronize"):
                    optimizer.step()
                optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

    as_in_one_process(way, script)


@pytest.mark.parametrize("drop", ["model", "optimizer"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_skipped_after_synchronize_leaves_nothing_behind(way: str, drop: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(5):
            loss_of(model, step, alone).backward()
            if not alone:
                optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if step % 2 == 0:
                optimizer.step()
            (model if drop == "model" else optimizer).zero_grad()

    as_in_one_process(way, script)


@pytest.mark.parametrize("accumulated", ["first", "no_sync", "incomplete"])
@pytest.mark.parametrize("way", WAYS)
def test_a_change_of_gradients_that_are_local_still_is_refused(way: str, accumulated: str) -> None:
    model = small_model()
    passes = 2 if accumulated == "incomplete" else 1
    optimizer = WRAP[way](SGD(model.parameters(), 0.1), model, backward_passes_per_step=passes)
    for step in range(1 if accumulated == "first" else 3):
        optimizer.zero_grad()
        with optimizer.no_sync() if accumulated == "no_sync" else contextlib.nullcontext():
            loss_of(model, step, False).backward()
        if step == 0 and accumulated != "first":
            optimizer.step()
            continue
        if accumulated != "first" and step == 1:
            model.zero_grad(set_to_none=False)  # who drops all of it hides nothing
            loss_of(model, step, False).backward()
            optimizer.step()
            continue
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(1e-3)
        with pytest.raises(GradientChanged, match=r"'0.weight' was changed after backward\(\); other ranks' gradients"):
            optimizer.step()


class Signed(SGD):
    """Keeps something of its own beside what torch keeps of an optimizer."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, lr, momentum)
        self.sign = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign() if self.sign else param.grad, alpha=group["lr"])


@pytest.mark.parametrize("way", PACKAGES)
def test_optimizers_have_attributes_of_their_own(way: str) -> None:
    as_in_one_process(way, train, Signed, elementwise=True)


@pytest.mark.parametrize("way", PACKAGES)
def test_what_was_frozen_or_unused_at_first_may_be_used_twice_later(way: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        model[0].requires_grad_(False)
        for step in range(5):
            if step == 1:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            for _ in range(2):
                loss_of(model, step, alone).backward()
            optimizer.step()

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", PACKAGES)
def test_what_only_other_ranks_used_twice_at_first_may_be_used_twice_later(way: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            optimizer.zero_grad()
            x = torch.ones(2, 6, dtype=torch.float64)
            for rank in range(dear.size()) if alone else [dear.rank()]:
                for _ in range(1 + (step + rank + (dear.size() == 1)) % 2):
                    (model(x * (rank + 1)).square().mean() / (dear.size() if alone else 1)).backward()
            optimizer.step()

    as_in_one_process(way, script)


def large_partitions(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Any:
    """Four to a weight here; other tests have small models, and partitions of a thousand bytes."""
    return bytescheduler_adapter.DistributedOptimizer(optimizer, model, partition_mb=0.064, credit_mb=0.128)


@pytest.mark.parametrize("way", WAYS)
def test_threads_that_look_at_once_see_the_same(way: str) -> None:
    torch.default_generator.manual_seed(3)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    wrap = large_partitions if way == "bytescheduler" else WRAP[way]
    optimizer = wrap(SGD(model.parameters(), 0.01), model)
    x = torch.ones(4, 256)

    def look(_: int) -> float:
        with torch.no_grad():
            return float(model(x).sum())

    with ThreadPoolExecutor(4) as pool:
        for _ in range(6):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            assert len(set(pool.map(look, range(4)))) == 1


def test_an_optimizer_that_was_wrapped_while_it_was_tuned_may_be_wrapped_again() -> None:
    """It takes one step for each of the script's, with averages; its own step() then uses the last one, as in torch."""
    model, reference = small_model(), small_model()
    plain = SGD(reference.parameters(), 0.1)
    train(reference, plain, True, steps=12)
    plain.step()
    inner = SGD(model.parameters(), 0.1)
    train(model, mgwfbp.DistributedOptimizer(inner, model), False, steps=2)
    tuned = dear.DistributedOptimizer(inner, model, tune=dear.Tuning(warmup=0, window=3))
    train(model, tuned, False, steps=2, first=2)
    optimizer = dear.DistributedOptimizer(inner, model, strategy="wfbp")
    train(model, optimizer, False, steps=8, first=4)
    optimizer.synchronize()
    inner.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_step_before_the_first_backward_teaches_nothing(strategy: str) -> None:
    """It silences a scheduler that wants it first. Then gradients arrive several times in a backward pass."""
    models = [MODELS["CheckpointedReentrant"]().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain = torch.optim.SGD(models[0].parameters(), 0.1, momentum=0.9)
    optimizer = WRAP[strategy](torch.optim.SGD(models[1].parameters(), 0.1, momentum=0.9), models[1])
    models[0].load_state_dict(models[1].state_dict())  # rank 0's
    for one in (plain, optimizer):
        one.zero_grad()
        one.step()
        one.step()
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).double()
    for _ in range(3):
        for model, one in zip(models, (plain, optimizer), strict=True):
            one.zero_grad()
            model(x).square().mean().backward()
            one.step()
    optimizer.synchronize()
    for expected, found in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(expected, found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", PACKAGES)
def test_what_is_left_in_grad_after_a_step(way: str) -> None:
    """Where only shards are averaged, this rank's own gradient."""
    model = small_model()
    optimizer = WRAP[way](SGD(model.parameters(), 0.1), model)
    train(model, optimizer, False)
    averaged = way not in ("dear-layerwise", "oss")
    expected = torch.autograd.grad(loss_of(model, 2, averaged), list(model.parameters()))
    train(model, optimizer, False, steps=1, first=2)
    for param, gradient in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, gradient, rtol=1e-9, atol=1e-12)
