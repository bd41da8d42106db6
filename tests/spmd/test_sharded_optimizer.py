"""OSS alone: each rank keeps the state of what it owns, updates it by the gradients it has, and sends it."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dear
from oss import OSS
from overlap.plan.assignment import assign_owners
from tests.spmd.listening import heard
from tests.spmd.training import local_loss, same_values

pytestmark = pytest.mark.four_ranks

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),  # has state for all parameters at once
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def _needs_others() -> None:
    if dear.size() == 1:
        pytest.skip("there are no others")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


_loss = functools.partial(local_loss, width=6, dtype=torch.float32)


def _owners(model: nn.Module) -> list[int]:
    return list(assign_owners([parameter.numel() for parameter in model.parameters()], [0] * dear.size()))


def _by_owners(model: nn.Module, step: int, scale: float = 1.0) -> None:
    """What one process has to put into ``.grad``: of each parameter the gradient on its owner's data."""
    parameters = list(model.parameters())
    of_rank = [torch.autograd.grad(_loss(model, step, rank) * scale, parameters) for rank in range(dear.size())]
    for number, (parameter, owner) in enumerate(zip(parameters, _owners(model), strict=True)):
        parameter.grad = of_rank[owner][number]


def _alike(mine: Any, reference: Any) -> None:
    """Two state dicts, in every bit."""
    assert mine["param_groups"] == reference["param_groups"]
    assert list(mine["state"]) == list(reference["state"])
    for number, entries in reference["state"].items():
        assert entries.keys() == mine["state"][number].keys()
        for name, value in entries.items():
            assert torch.equal(torch.as_tensor(mine["state"][number][name]), torch.as_tensor(value)), (number, name)


@pytest.mark.filterwarnings("ignore:c10d")  # torch's, of a loss that is reduced in place
@every_optimizer
def test_owners_train_on_their_own_gradients_where_nothing_reduces_them(name: str) -> None:
    cls, options = OPTIMIZERS[name]
    mine, reference = _model(), _model()
    optimizer, plain = OSS(params=mine.parameters(), optim=cls, **options), cls(reference.parameters(), **options)
    assert isinstance(optimizer.optim, cls)
    with heard(logging.WARNING) as said:
        for step in range(3):
            mine.zero_grad()
            loss = _loss(mine, step, dear.rank())
            if dear.size() > 1:
                dist.all_reduce(loss, op=dist.ReduceOp.SUM)
            loss /= dear.size()
            loss.backward()
            gradients = [parameter.grad for parameter in mine.parameters()]
            optimizer.step()
            assert all(p.grad is gradient for p, gradient in zip(mine.parameters(), gradients, strict=True))
            _by_owners(reference, step, scale=1 / dear.size())
            plain.step()
            same_values(mine, reference)
    assert len([text for text in said if "nothing has reduced them" in text]) == (dear.rank() == 0 and dear.size() > 1)
    owners = _owners(mine)
    held = [number for number, parameter in enumerate(mine.parameters()) if parameter in optimizer.state]
    assert held == [number for number, owner in enumerate(owners) if owner == dear.rank()]
    _alike(optimizer.state_dict(all_ranks=True), plain.state_dict())


def test_gradients_that_are_all_zero_tell_nothing_yet() -> None:
    _needs_others()
    model = _model()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    with heard(logging.WARNING) as said:
        for factor in (0, 1):
            optimizer.zero_grad()
            (factor * _loss(model, factor, dear.rank())).backward()
            optimizer.step()
            assert len(said) == (factor if dear.rank() == 0 else 0)


@pytest.mark.parametrize(("order", "max_norm"), [(2.0, 0.01), (math.inf, 0.01), (2.0, 1e6)])
def test_under_ddp_it_is_the_plain_optimizer_with_clipping_and_a_schedule(order: float, max_norm: float) -> None:
    _needs_others()
    models = [DistributedDataParallel(_model()) for _ in range(2)]
    optimizer = OSS(models[0].parameters(), torch.optim.AdamW, lr=0.01)
    plain = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, plain)]
    with heard(logging.WARNING) as said:
        for step in range(3):
            for each, model in zip((optimizer, plain), models, strict=True):
                each.zero_grad()
                _loss(model, step, dear.rank()).backward()
            mine = optimizer.clip_grad_norm(max_norm, order)
            theirs = nn.utils.clip_grad_norm_(models[1].parameters(), max_norm, order)
            torch.testing.assert_close(mine, theirs)
            for each, schedule in zip((optimizer, plain), schedules, strict=True):
                each.step()
                schedule.step()
    assert not said
    assert optimizer.param_groups[0]["lr"] == 0.01 / 8
    for mine, reference in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_no_norm_hides_what_is_no_number(order: float) -> None:
    for number in range(len(list(_model().parameters()))):
        model = _model()
        optimizer = OSS(model.parameters())
        _gradients(model, optimizer, 0)
        parameter = list(model.parameters())[number]
        parameter.grad = torch.full_like(parameter, math.nan)
        assert math.isnan(optimizer.clip_grad_norm(1.0, order)), number
        for each in model.parameters():  # as torch's function leaves them
            assert each.grad is None or bool(each.grad.isnan().all())


def _gradients(model: nn.Module, optimizer: Any, step: int) -> torch.Tensor:
    """The same on every rank. Returns the loss."""
    optimizer.zero_grad()
    loss = _loss(model, step, 0)
    loss.backward()
    return loss


def _steps(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        _gradients(model, optimizer, step)
        optimizer.step()


def test_whole_state_is_on_the_recipient_and_goes_on_in_either_optimizer() -> None:
    mine, plain = _model(), _model()
    recipient = dear.size() - 1
    optimizer, reference = OSS(mine.parameters(), torch.optim.AdamW), torch.optim.AdamW(plain.parameters())
    _steps(mine, optimizer, range(2))
    _steps(plain, reference, range(2))
    with pytest.raises(RuntimeError, match=r"OSS\.state_dict\(\).*consolidate_state_dict"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(recipient_rank=recipient)
    if dear.rank() == recipient:
        _alike(optimizer.state_dict(), reference.state_dict())
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    saved = copy.deepcopy(optimizer.state_dict(all_ranks=True))
    _steps(mine, optimizer, range(2, 4))
    with pytest.raises(RuntimeError, match="after the last step"):
        optimizer.state_dict()

    resumed = copy.deepcopy(plain)
    again = OSS(resumed.parameters(), torch.optim.AdamW)
    again.consolidate_state_dict(-1)
    again.load_state_dict(copy.deepcopy(saved))  # which becomes its own
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        again.state_dict()
    held = [number for number, parameter in enumerate(resumed.parameters()) if parameter in again.state]
    assert held == [number for number, owner in enumerate(_owners(resumed)) if owner == dear.rank()]
    _steps(resumed, again, range(2, 4))
    same_values(resumed, mine)
    reference.load_state_dict(saved)
    _steps(plain, reference, range(2, 4))
    same_values(plain, mine)


def test_hooks_may_change_what_is_saved_and_what_is_loaded() -> None:
    model = _model()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 5})
    saved = optimizer.state_dict(all_ranks=True)
    assert saved["note"] == 5
    other = copy.deepcopy(saved)
    other["param_groups"][0]["lr"] = 0.5
    optimizer.register_load_state_dict_pre_hook(lambda _, state: other)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_in_float16_all_compute_with_rounded_values_and_owners_keep_exact_ones() -> None:
    """But of what a script has written, which counts as it is."""
    mine, reference = _model(), _model()
    make: Callable[..., Any] = lambda model: OSS(model.parameters(), torch.optim.SGD, broadcast_fp16=True, lr=0.01)  # noqa: E731
    optimizer, plain = make(mine), torch.optim.SGD(reference.parameters(), lr=0.01)
    exact = [parameter.detach().clone() for parameter in reference.parameters()]
    for step in range(4):
        if step == 1:
            with torch.no_grad():
                for weight in (mine[0].weight, reference[0].weight, exact[0]):
                    weight[0, 0] = 0.3
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict(all_ranks=True))
            optimizer = make(mine)
            optimizer.load_state_dict(saved)
        if step == 3:
            loss = optimizer.step(functools.partial(_gradients, mine, optimizer, 3))
            assert torch.equal(loss, _loss(reference, 3, 0))
        else:
            _steps(mine, optimizer, range(step, step + 1))
        _gradients(reference, plain, step)
        with torch.no_grad():
            for parameter, kept in zip(reference.parameters(), exact, strict=True):
                parameter.copy_(kept)
            plain.step()
            for parameter, kept in zip(reference.parameters(), exact, strict=True):
                kept.copy_(parameter)
                parameter.copy_(kept.half())
        same_values(mine, reference)
    saved = optimizer.state_dict(all_ranks=True)
    assert all(torch.equal(saved["master"][number], kept) for number, kept in enumerate(exact))


def test_what_is_frozen_added_and_thawed() -> None:
    mine, reference = _model(), _model()
    layers = list(zip((mine[0], mine[2]), (reference[0], reference[2]), strict=True))
    for layer in layers[0]:
        layer.requires_grad_(False)
    optimizer = OSS(mine[0].parameters(), torch.optim.SGD, lr=0.1, momentum=0.5)
    plain = torch.optim.SGD(reference[0].parameters(), lr=0.1, momentum=0.5)
    optimizer.add_param_group({"params": mine[2].parameters(), "lr": 0.2})
    plain.add_param_group({"params": reference[2].parameters(), "lr": 0.2})
    shares = optimizer.partition_parameters()
    assert len(shares) == dear.size()
    frozen = assign_owners([1] * 4, [0] * dear.size())  # each counts as one element
    for parameter, owner in zip(mine.parameters(), frozen, strict=True):
        assert any(parameter is one for group in shares[owner] for one in group["params"])
    assert all([group["lr"] for group in share] == [0.1, 0.2] for share in shares)
    found = [parameter for share in shares for group in share for parameter in group["params"]]
    assert sorted(map(id, found)) == sorted(map(id, mine.parameters()))
    for step in range(4):
        if step == 2:
            for layer in layers[0]:
                layer.requires_grad_(True)
            optimizer.refresh_trainable()
        _steps(mine, optimizer, range(step, step + 1))
        _steps(reference, plain, range(step, step + 1))
        same_values(mine, reference)


def test_what_is_added_goes_to_the_rank_that_owns_least() -> None:
    model = _model()
    first, *others = model.parameters()
    optimizer = OSS([first])
    for parameter in others:
        optimizer.consolidate_state_dict(-1)
        optimizer.add_param_group({"params": [parameter]})
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()  # of fewer parameters
    shares = optimizer.partition_parameters()
    for parameter, owner in zip(model.parameters(), _owners(model), strict=True):
        assert any(parameter is one for group in shares[owner] for one in group["params"])


@pytest.mark.parametrize("fp16", [False, True])
def test_what_is_frozen_is_neither_sent_nor_rounded(fp16: bool) -> None:
    model = _model()
    model[0].requires_grad_(False)
    optimizer = OSS(model.parameters(), torch.optim.SGD, broadcast_fp16=fp16, lr=0.1)
    with torch.no_grad():
        model[0].weight.add_(dear.rank())
    before = model[0].weight.clone()
    _steps(model, optimizer, range(2))
    assert torch.equal(model[0].weight, before)


def test_it_goes_on_with_its_state_where_nobody_could_take_over() -> None:
    mine, reference = _model(), _model()
    optimizer = OSS(mine.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    _steps(mine, optimizer, range(2))
    with pytest.raises(ZeroDivisionError):
        optimizer.reduced_by(lambda _: 1 // 0)  # type: ignore[arg-type, return-value]
    _steps(mine, optimizer, range(2, 4))
    _steps(reference, plain, range(4))
    same_values(mine, reference)


def test_a_group_of_some_ranks_is_all_it_talks_to() -> None:
    _needs_others()
    groups = [dist.new_group([rank]) for rank in range(dear.size())]
    mine, reference = _model(), _model()
    optimizer = OSS(mine.parameters(), torch.optim.SGD, group=groups[dear.rank()], lr=0.1)
    assert optimizer.group is groups[dear.rank()]
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for model, each in ((mine, optimizer), (reference, plain)):
        for step in range(2 + dear.rank()):
            each.zero_grad()
            _loss(model, step, dear.rank()).backward()
            each.step()
    same_values(mine, reference)
    with pytest.raises(TypeError, match="with this rank in it"):
        OSS(mine.parameters(), group=groups[dear.rank() - 1])


def test_what_ranks_have_to_share() -> None:
    _needs_others()
    with pytest.raises(ValueError, match="OSS got other parameters on other ranks"):
        OSS(nn.Linear(3 + dear.rank(), 2).parameters())
    model = _model()
    optimizer = OSS(model.parameters())
    model[0].requires_grad_(dear.rank() == 0)
    before = copy.deepcopy(model)
    _loss(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="ranks train different parameters"):
        optimizer.step()
    same_values(model, before)


def test_what_it_cannot_do_is_refused() -> None:
    model = _model()
    with pytest.raises(TypeError, match="should be the class of an optimizer"):
        OSS(model.parameters(), torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="LBFGS"):
        OSS(model.parameters(), torch.optim.LBFGS)
    with pytest.warns(DeprecationWarning, match="broadcast_buffer_size=8 has no effect, as in fairscale"):
        optimizer = OSS(model.parameters(), broadcast_buffer_size=8)
    with pytest.raises(ValueError, match=f"from -1 to {dear.size() - 1} and is {dear.size()}"):
        optimizer.consolidate_state_dict(dear.size())
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="should choose among"):
        optimizer.clip_grad_norm(1.0, filter_params_fn=lambda _: [torch.zeros(1)])
