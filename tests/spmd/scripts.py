"""Whole scripts that do more than train one model with one optimizer; each runs alone and on several ranks alike.

A script returns what has to be the same then. None stands for what only rank 0 has.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import dear
from tests.spmd.loops import GLOBAL_BATCH
from tests.spmd.models import WIDTH, Mlp, Sometimes

Wrap = Callable[[torch.optim.Optimizer, nn.Module], Any]
STEPS = 5


@dataclass
class World:
    """`wrap` distributes an optimizer, or leaves it as it is where `rank` is None."""

    wrap: Wrap
    rank: int | None
    size: int

    def share(self, number: int, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """This rank's part of global batch `number`."""
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(GLOBAL_BATCH, width, generator=generator, dtype=dtype)
        batch[1:, 0] = -batch[1:, 0].abs()  # at most the first rank takes the branch of `Sometimes`
        if self.rank is None:
            return batch
        share = GLOBAL_BATCH // self.size
        return batch[self.rank * share : (self.rank + 1) * share].clone()

    def sync(self, *optimizers: Any) -> None:
        for optimizer in optimizers:
            if self.rank is not None:
                optimizer.synchronize()


def _adam(*modules: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for module in modules for p in module.parameters()], lr, eps=1e-3)


def _build(*classes: type[nn.Module]) -> list[nn.Module]:
    torch.manual_seed(99)
    return [cls().double() for cls in classes]


def gan(world: World) -> Any:
    """Two optimizers in turn; the generator's step leaves gradients in the discriminator, which ranks use differently."""
    generator, critic = _build(Mlp, Sometimes)
    ours, theirs = world.wrap(_adam(generator), generator), world.wrap(_adam(critic), critic)
    for step in range(STEPS):
        noise, real = world.share(2 * step), world.share(2 * step + 1)
        theirs.zero_grad()
        loss = critic(generator(noise).detach()).square().mean() - critic(real).mean()
        loss.backward()
        if world.rank is not None:
            dear.allreduce(loss.detach())  # between backward and step, where ranks stand at different buckets
        theirs.step()
        ours.zero_grad()
        critic(generator(noise)).mean().backward()
        ours.step()
    return [m.state_dict() for m in (generator, critic)], [o.state_dict() for o in (ours, theirs)]


def frozen_critic(world: World) -> Any:
    """As above, with the discriminator frozen while the generator learns."""
    generator, critic = _build(Mlp, Mlp)
    ours, theirs = world.wrap(_adam(generator), generator), world.wrap(_adam(critic), critic)
    for step in range(STEPS):
        noise = world.share(step)
        critic.requires_grad_(False)
        ours.zero_grad()
        critic(generator(noise)).mean().backward()
        ours.step()
        critic.requires_grad_(True)
        theirs.zero_grad()
        critic(generator(noise).detach()).square().mean().backward()
        theirs.step()
    return [m.state_dict() for m in (generator, critic)], [o.state_dict() for o in (ours, theirs)]


def two_optimizers_on_one_model(world: World) -> Any:
    (model,) = _build(Sometimes)
    inner = world.wrap(_adam(model.inner), model)
    outer = world.wrap(
        torch.optim.SGD([*model.head.parameters(), *model.branch.parameters()], 0.1, momentum=0.9), model
    )
    for step in range(STEPS):
        inner.zero_grad()
        outer.zero_grad()
        model(world.share(step)).square().mean().backward()
        outer.step()
        inner.step()
    return model.state_dict(), inner.state_dict(), outer.state_dict()


def two_models_under_one_optimizer(world: World) -> Any:
    """Only the first of them is named; the other one's parameters are found where they are."""
    encoder, decoder = _build(Mlp, Mlp)
    optimizer = world.wrap(_adam(encoder, decoder), encoder)
    for step in range(STEPS):
        x = world.share(step)
        optimizer.zero_grad()
        functional.mse_loss(decoder(encoder(x)), x).backward()
        optimizer.step()
    return encoder.state_dict(), decoder.state_dict(), optimizer.state_dict()


def two_backwards_through_shared_parts(world: World) -> Any:
    trunk, first, second = _build(Mlp, Mlp, Mlp)
    model = nn.ModuleList([trunk, first, second])
    optimizer = world.wrap(_adam(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        shared = trunk(world.share(step))
        first(shared).square().mean().backward(retain_graph=True)
        second(shared).mean().backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def gradient_penalty(world: World) -> Any:
    (critic,) = _build(Mlp)
    optimizer = world.wrap(_adam(critic), critic)
    for step in range(STEPS):
        x = world.share(step).requires_grad_()
        optimizer.zero_grad()
        score = critic(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        (score.mean() + 10 * penalty).backward()
        optimizer.step()
    return critic.state_dict(), optimizer.state_dict()


def backward_that_can_be_differentiated(world: World) -> Any:
    (model,) = _build(Mlp)
    optimizer = world.wrap(_adam(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(world.share(step)).square().mean().backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()  # a gradient with a graph and its parameter keep each other alive
    return model.state_dict(), optimizer.state_dict()


class _MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single, self.double_ = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double()
        self.phase = nn.Parameter(torch.linspace(-1, 1, WIDTH).to(torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.single(x.float()))
        return self.double_(y.double()) + torch.view_as_real(self.phase * y).sum(-1) + self.empty.sum()


def mixed_types(world: World) -> Any:
    torch.manual_seed(99)
    model = _MixedTypes()
    optimizer = world.wrap(torch.optim.SGD(model.parameters(), 0.1, momentum=0.5), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(world.share(step)).square().mean().backward()
        optimizer.step()
    momenta = [state["momentum_buffer"] for _, state in sorted(optimizer.state_dict()["state"].items())]
    assert {value.dtype for value in momenta} == {torch.float32, torch.float64, torch.complex64}
    # What follows from a single-precision layer is good to single precision.
    return [value.to(torch.complex64) for value in (*model.state_dict().values(), *momenta)]


def less_than_one_element_for_each_rank(world: World) -> Any:
    torch.manual_seed(99)
    model = nn.Linear(1, 1).double()
    optimizer = world.wrap(_adam(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(world.share(step, 1)).square().mean().backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def copied_and_pickled_before_wrapping(world: World) -> Any:
    results = []
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        (original,) = _build(Mlp)
        inner = _adam(original)
        original(world.share(100).abs()).sum().backward()
        for parameter in original.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(0.25)
        inner.step()  # so that there is state to copy
        original.zero_grad()
        model, inner = copied((original, inner))
        optimizer = world.wrap(inner, model)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(world.share(step)).square().mean().backward()
            optimizer.step()
        results.append((model.state_dict(), optimizer.state_dict()))
    return results


def averaged_right_after_the_step(world: World) -> Any:
    (model,) = _build(Mlp)
    optimizer = world.wrap(_adam(model), model)
    smooth = torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=smooth)
    shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(STEPS):
        optimizer.zero_grad()
        model(world.share(step)).square().mean().backward()
        optimizer.step()
        ema.update_parameters(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                shadow[name].lerp_(parameter, 0.3)
    return model.state_dict(), ema.state_dict(), shadow


def parametrized(world: World) -> Any:
    (model,) = _build(Mlp)
    nn.utils.parametrizations.weight_norm(model.inner[0])
    nn.utils.parametrizations.spectral_norm(model.inner[3])
    nn.utils.parametrizations.orthogonal(model.head)
    optimizer = world.wrap(_adam(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(world.share(step)).square().mean().backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def passes_changed_while_training(world: World) -> Any:
    (model,) = _build(Mlp)
    optimizer = world.wrap(_adam(model), model)
    number = 0
    for passes, actual in ((1, 1), (3, 3), (3, 3), (2, 2), (2, 1), (1, 1)):  # one window ends before it is full
        if world.rank is not None:
            optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        for _ in range(actual):
            (model(world.share(number)).square().mean() / actual).backward()
            number += 1
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def frozen_and_thawed_again(world: World) -> Any:
    (model,) = _build(Mlp)
    optimizer = world.wrap(_adam(model), model)
    for step in range(7):
        model.inner.requires_grad_(step not in (2, 3, 5))
        optimizer.zero_grad()
        model(world.share(step)).square().mean().backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def saved_by_rank_0_alone(world: World) -> Any:
    """After backward, after the step, in the middle of a window: the other ranks do not know that they are asked."""
    (model,) = _build(Mlp)
    optimizer = world.wrap(_adam(model), model)
    if world.rank is not None:
        optimizer.set_backward_passes_per_step(2)
    saved: list[Any] = []

    def save() -> None:
        if world.rank in (None, 0):
            saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))

    for step in range(4):
        optimizer.zero_grad()
        for half in range(2):
            (model(world.share(2 * step + half)).square().mean() / 2).backward()
            save()
        optimizer.step()
        save()
    return saved if world.rank in (None, 0) else None


SCRIPTS: dict[str, Callable[[World], Any]] = {
    script.__name__: script
    for script in (
        gan,
        frozen_critic,
        two_optimizers_on_one_model,
        two_models_under_one_optimizer,
        two_backwards_through_shared_parts,
        gradient_penalty,
        backward_that_can_be_differentiated,
        mixed_types,
        less_than_one_element_for_each_rank,
        copied_and_pickled_before_wrapping,
        averaged_right_after_the_step,
        parametrized,
        passes_changed_while_training,
        frozen_and_thawed_again,
        saved_by_rank_0_alone,
    )
}
