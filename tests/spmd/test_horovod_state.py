"""The root's parameters and optimizer state on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear as hvd


def _model(memory_format: torch.memory_format = torch.channels_last) -> torch.nn.Sequential:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 2), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(3, 2)
    )
    return model.to(memory_format=memory_format)  # type: ignore[call-overload,no-any-return]


def _digest(tensors: Any) -> list[float]:
    return [float(tensor.detach().double().sum()) for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _same_everywhere(values: Any) -> None:
    assert len({repr(each) for each in hvd.allgather_object(values)}) == 1


@pytest.mark.parametrize("form", ["state_dict", "named", "list of pairs", "parameters"])
def test_parameters(form: str) -> None:
    model = _model()
    strides = model[0].weight.stride()
    forms: dict[str, Any] = {
        "state_dict": model.state_dict(),
        "named": model.named_parameters(),
        "list of pairs": list(model.named_parameters()),
        "parameters": list(model.parameters()),
    }
    root = hvd.size() - 1
    before = hvd.broadcast_object(_digest(model.parameters()), root)
    hvd.broadcast_parameters(forms[form], root)
    assert _digest(model.parameters()) == before
    assert model[0].weight.stride() == strides
    if form == "state_dict":
        _same_everywhere(_digest(model.state_dict().values()))


def test_what_is_no_tensor_is_left_alone_and_expanded_memory_is_written_once() -> None:
    mixed = {"steps": hvd.rank(), "weight": torch.full((2, 1), float(hvd.rank())).expand(2, 3)}
    hvd.broadcast_parameters(mixed, 0)
    assert mixed["steps"] == hvd.rank()
    assert isinstance(mixed["weight"], torch.Tensor)
    assert mixed["weight"].sum() == 0


@pytest.mark.parametrize("form", ["dict", "pairs", "list"])
def test_parameters_that_are_none_are_left_alone(form: str) -> None:
    """As a module's bias may be, and an entry of a state."""
    weight, root = torch.full((2,), float(hvd.rank())), hvd.size() - 1
    forms: dict[str, Any] = {
        "dict": {"bias": None, "weight": weight},
        "pairs": [("bias", None), ("weight", weight)],
        "list": [None, weight],
    }
    hvd.broadcast_parameters(forms[form], root)
    assert weight.tolist() == [root] * 2
    assert forms[form] == {"bias": None, "weight": weight} or forms[form][0] in (None, ("bias", None))
    nothing: list[Any] = [None]
    hvd.broadcast_parameters(nothing, root)
    hvd.broadcast_parameters({}, root)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_state_and_options_that_are_none_are_the_roots(wrapped: bool) -> None:
    """As SGD's momentum buffer is where there is none yet, and `foreach` where torch decides; the others have tensors."""
    model = _model(torch.contiguous_format)
    root = hvd.size() - 1
    here = hvd.rank() == root
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=None if here else False)
    for number, param in enumerate(model.parameters()):
        with_buffer = not here or number == 1
        optimizer.state[param]["momentum_buffer"] = torch.full_like(param, hvd.rank()) if with_buffer else None
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model, sync_start=False)
    hvd.broadcast_optimizer_state(optimizer, root)
    found = optimizer.state_dict()
    assert found["param_groups"][0]["foreach"] is None
    for number, entry in found["state"].items():
        buffer = entry["momentum_buffer"]
        if number == 1:
            assert torch.equal(buffer, torch.full_like(buffer, root))
        else:
            assert buffer is None


OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr, amsgrad=True),
    "LBFGS": lambda params, lr: torch.optim.LBFGS(params, lr),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_follows_the_root_and_takes_no_step(name: str) -> None:
    model = _model(torch.contiguous_format)  # torch's LBFGS takes no other
    hvd.broadcast_parameters(model.state_dict(), 0)
    root = hvd.size() - 1
    optimizer = OPTIMIZERS[name](model.parameters(), 0.1 / (1 + hvd.rank()))
    if hvd.rank() == root:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(4, 2, 2, 2)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    before = _digest(model.parameters())
    hvd.broadcast_optimizer_state(optimizer, root, model=model)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / (1 + root))
    assert _digest(model.parameters()) == before
    state = optimizer.state_dict()["state"]
    assert state
    _same_everywhere([(key, _digest(entry.values())) for key, entry in sorted(state.items())])


@pytest.mark.parametrize("wrapped", [False, True])
def test_no_gradient_is_left_where_there_was_none(wrapped: bool) -> None:
    """Horovod leaves zeros, which a step would decay and give momentum to."""
    model = _model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert [parameter.grad for parameter in model.parameters() if parameter.grad is not None] == []


def test_a_distributed_optimizer_takes_the_roots_state_too() -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 2, 2, 2), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5 + hvd.rank()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.zero_grad()
    model(torch.ones(2, 2, 2, 2)).sum().backward()
    optimizer.step()
    _same_everywhere(_digest(model.parameters()))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("strategy", ["dear", "wfbp"])
def test_resuming_on_rank_0_after_wrapping_reaches_every_rank(strategy: str, steps: int) -> None:
    """As Horovod's ImageNet script does: wrap, load a checkpoint on rank 0, broadcast the model and the optimizer."""
    model = _model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01), model, strategy=strategy)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.full((2, 2, 2, 2), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()

    for _ in range(steps):
        step()
    if hvd.rank() == 0:
        model.load_state_dict({name: torch.full_like(value, 3) for name, value in model.state_dict().items()})
    state = model.state_dict()
    hvd.broadcast_parameters(state, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for value in (*model.parameters(), *model.buffers(), *state.values()):
        assert torch.equal(value, torch.full_like(value, 3))
    step()
    _same_everywhere(_digest(model.parameters()))
    assert not torch.equal(model[3].bias, torch.full_like(model[3].bias, 3))


def _refused(call: Callable[[], None], last_gives_no_good: bool, message: str) -> None:
    """Rank 0 (alone: nobody) waits for what the last rank refuses; both show the same reason."""
    if hvd.size() == 1 and not last_gives_no_good:
        call()
        return
    with pytest.raises((hvd.HorovodInternalError, ValueError, TypeError), match=message):
        call()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()  # and everything goes on


def test_parameters_of_the_wrong_kind_or_of_another_model_are_refused_on_all_ranks() -> None:
    last = hvd.rank() == hvd.size() - 1
    model = _model()
    for wrong, message in (
        (3, "params should be a state_dict or a list.* is a int"),
        ([(1, 2, 3)], r"or pairs \(name"),
    ):
        given: Any = wrong if last else model.state_dict()
        _refused(lambda given=given: hvd.broadcast_parameters(given, 0), True, message)  # type: ignore[misc]
    state = dict(model.state_dict())
    if last:
        state["3.offset"] = state.pop("3.bias")
    _refused(lambda: hvd.broadcast_parameters(state, 0), False, r"'3.bias' on rank 0 and '?3.offset|names differ")
    if last and hvd.size() > 1:
        del state["3.offset"]
    _refused(lambda: hvd.broadcast_parameters(state, 0), False, r"number of tensors differs.*9 on rank 0 and 8 on rank")


def test_optimizers_of_the_wrong_kind_or_with_other_groups_are_refused_on_all_ranks() -> None:
    last = hvd.rank() == hvd.size() - 1
    model = _model()
    good = torch.optim.SGD(model.parameters(), 0.1)
    given: Any = model if last else good
    _refused(
        lambda: hvd.broadcast_optimizer_state(given, 0), True, "should be a torch.optim.Optimizer and is Sequential"
    )
    params = list(model.parameters())
    other = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], 0.1)
    mine = other if last and hvd.size() > 1 else good
    _refused(
        lambda: hvd.broadcast_optimizer_state(mine, 0), False, r"differ between ranks: \[6\] on rank 0 and \[2, 4\] on"
    )
