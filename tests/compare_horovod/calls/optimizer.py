"""`DistributedOptimizer`, its ten arguments and what scripts do to it; `SyncBatchNorm`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tests.compare_horovod.calls.call import Calls, ones, ramp

__all__ = ["CALLS"]


_count = itertools.count()


def _names(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names that no other call has: what one has left under way under its own does not meet the next."""
    call = next(_count)
    return ((f"{call}.{name}", parameter) for name, parameter in model.named_parameters())


def _wrapped(hvd: Any, **arguments: Any) -> tuple[torch.nn.Linear, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    arguments.setdefault("named_parameters", _names(model))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return model, hvd.DistributedOptimizer(inner, **arguments)


def _backward(model: torch.nn.Module, scale: float) -> torch.Tensor:
    loss: torch.Tensor = model(ones(2, 2) * scale).square().mean()
    loss.backward()
    return loss


def _values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _train(hvd: Any, r: int, **arguments: Any) -> Any:
    model, optimizer = _wrapped(hvd, **arguments)
    for step in range(2):
        optimizer.zero_grad()
        _backward(model, 0.5 + r + step)
        optimizer.step()
    return _values(model)


def _positional(hvd: Any, r: int, n: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    named = _names(model)
    optimizer = hvd.DistributedOptimizer(
        inner, named, hvd.Compression.none, 1, hvd.Average, 1.0, 0, None, False, hvd.global_process_set
    )
    _backward(model, 1.0 + r)
    optimizer.step()
    return _values(model)


def _named(hvd: Any, r: int, naming: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), naming(model))
    _backward(model, 1.0 + r)
    optimizer.step()
    return _values(model)


def _grouped(hvd: Any, r: int, n: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, _names(model), groups=[[model.weight, model.bias]])
    _backward(model, 1.0 + r)
    optimizer.step()
    return _values(model)


def _script(hvd: Any, r: int, play: Any, **arguments: Any) -> Any:
    """`play(model, optimizer)`, and what the parameters are then."""
    model, optimizer = _wrapped(hvd, **arguments)
    seen = play(model, optimizer)
    return [seen, _values(model)]


def _passes(model: Any, optimizer: Any, scales: list[float]) -> None:
    for scale in scales:
        _backward(model, scale)
    optimizer.step()


def _set_passes(model: Any, optimizer: Any, r: int) -> None:
    optimizer.set_backward_passes_per_step(2)
    _passes(model, optimizer, [1.0, r])


def _clipped(model: Any, optimizer: Any, r: int) -> Any:
    _backward(model, 10.0 * (r + 1))
    optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    return norm


def _synchronized(model: Any, optimizer: Any, r: int) -> Any:
    _backward(model, 1.0 + r)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return len(caught)


def _dropped(model: Any, optimizer: Any, r: int) -> None:
    _backward(model, 1.0 + r)
    optimizer.zero_grad()
    optimizer.step()


def _closure(model: Any, optimizer: Any, r: int) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return _backward(model, 1.0 + r)

    return optimizer.step(closure).detach()


def _scheduled(model: Any, optimizer: Any, r: int) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        _backward(model, 1.0 + r)
        optimizer.step()
        scheduler.step()
    return scheduler.get_last_lr()


def _scaled(model: Any, optimizer: Any, r: int) -> Any:
    """Horovod's recipe; rank 0's second step overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(ones(2, 2) * (1 + r)).square().mean() * (float("inf") if step == 1 and r == 0 else 1.0)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def _embedding(hvd: Any, r: int, n: int, **arguments: Any) -> Any:
    torch.manual_seed(0)
    # Two columns: torch 2.13 adds nothing of a sparse gradient that is one row of one column, expanded by sum().
    model = torch.nn.Embedding(3, 2, sparse=True)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, _names(model), **arguments)
    model(torch.tensor([min(r, 2)])).sum().backward()
    optimizer.step()
    return _values(model)


def _bias_unused(model: Any, optimizer: Any, r: int, everywhere: bool) -> None:
    model.weight.sum().backward() if r or everywhere else _backward(model, 1.0)
    optimizer.step()


def _state_keys(model: Any, optimizer: Any, r: int) -> Any:
    _backward(model, 1.0 + r)
    optimizer.step()
    state = optimizer.state_dict()
    return [sorted(state), sorted(state["param_groups"][0]), sorted(map(str, state["state"]))]


def _classes(hvd: Any) -> Any:
    _, optimizer = _wrapped(hvd)
    return [isinstance(optimizer, torch.optim.Optimizer), isinstance(optimizer, torch.optim.SGD)]


def _normalised(hvd: Any, r: int, n: int) -> Any:
    layer = hvd.SyncBatchNorm(2)
    x = (ramp(8).view(2, 2, 2) * (r + 1)).requires_grad_()
    y = layer(x)
    (y * ramp(8).view(2, 2, 2)).sum().backward()
    return [y.detach(), x.grad, layer.weight.grad, layer.running_mean]


CALLS: Calls = {
    "plain": lambda hvd, r, n: _train(hvd, r),
    "without names": lambda hvd, r, n: _train(hvd, r, named_parameters=None),
    "ten arguments by position": _positional,
    "compression=fp16": lambda hvd, r, n: _train(hvd, r, compression=hvd.Compression.fp16),
    "op=Sum": lambda hvd, r, n: _train(hvd, r, op=hvd.Sum),
    "op=Min": lambda hvd, r, n: _train(hvd, r, op=hvd.Min),
    "op=Adasum": lambda hvd, r, n: _train(hvd, r, op=hvd.Adasum),
    "gradient_predivide_factor": lambda hvd, r, n: _train(hvd, r, gradient_predivide_factor=2.0),
    "gradient_predivide_factor, Sum": lambda hvd, r, n: _train(hvd, r, gradient_predivide_factor=2.0, op=hvd.Sum),
    "num_groups=1": lambda hvd, r, n: _train(hvd, r, num_groups=1),
    "num_groups=-1": lambda hvd, r, n: _train(hvd, r, num_groups=-1),
    "groups of parameters": _grouped,
    "groups=3.5": lambda hvd, r, n: _train(hvd, r, groups=3.5),
    "process_set": lambda hvd, r, n: _train(hvd, r, process_set=hvd.global_process_set),
    "backward_passes_per_step=0": lambda hvd, r, n: _train(hvd, r, backward_passes_per_step=0),
    "a name twice": lambda hvd, r, n: _named(hvd, r, lambda m: [("a", m.weight), ("a", m.bias)]),
    "a name missing": lambda hvd, r, n: _named(hvd, r, lambda m: [("a", m.weight)]),
    "parameters without names": lambda hvd, r, n: _named(hvd, r, lambda m: list(m.parameters())),
    "names in a list": lambda hvd, r, n: _named(hvd, r, lambda m: list(m.named_parameters())),
    "classes": lambda hvd, r, n: _classes(hvd),
    "step twice": lambda hvd, r, n: _script(
        hvd, r, lambda m, o: [_backward(m, 1.0 + r).detach(), o.step(), o.step()][1:]
    ),
    "two passes": lambda hvd, r, n: _script(hvd, r, lambda m, o: _passes(m, o, [1.0, r]), backward_passes_per_step=2),
    "one pass of two": lambda hvd, r, n: _script(
        hvd, r, lambda m, o: _passes(m, o, [1.0 + r]), backward_passes_per_step=2
    ),
    "two passes, set later": lambda hvd, r, n: _script(hvd, r, lambda m, o: _set_passes(m, o, r)),
    "clipped": lambda hvd, r, n: _script(hvd, r, lambda m, o: _clipped(m, o, r)),
    "synchronize without skip_synchronize": lambda hvd, r, n: _script(hvd, r, lambda m, o: _synchronized(m, o, r)),
    "scheduler": lambda hvd, r, n: _script(hvd, r, lambda m, o: _scheduled(m, o, r)),
    "GradScaler": lambda hvd, r, n: _script(hvd, r, lambda m, o: _scaled(m, o, r)),
    "sparse_as_dense": lambda hvd, r, n: _embedding(hvd, r, n, sparse_as_dense=True),
    "sparse": _embedding,
    "bias unused on some ranks": lambda hvd, r, n: _script(hvd, r, lambda m, o: _bias_unused(m, o, r, False)),
    "bias unused": lambda hvd, r, n: _script(hvd, r, lambda m, o: _bias_unused(m, o, r, True)),
    "keys of state_dict": lambda hvd, r, n: _script(hvd, r, lambda m, o: _state_keys(m, o, r)),
    "SyncBatchNorm": _normalised,
    # From here on Horovod leaves reductions under way that nobody waits for.
    "closure": lambda hvd, r, n: _script(hvd, r, lambda m, o: _closure(m, o, r)),
    "zero_grad before step": lambda hvd, r, n: _script(hvd, r, lambda m, o: _dropped(m, o, r)),
    "a pass too many": lambda hvd, r, n: _script(hvd, r, lambda m, o: _passes(m, o, [1.0, 1.0])),
}
