"""Lets torch.nn.utils.clip_grad_norm_ and its kin, unmodified, work on gradients that are still local.

Frameworks call them between backward and ``step()``, and nobody there can call ``synchronize()`` first. So they ask here
what their parameters are, wherever a script has them from: each of torch's functions runs what a cell of its closure holds,
and the cell is given a function that looks first. Parameters of no distributed optimizer are clipped as ever.

[Note: strangers]
Where others are clipped together with those of a distributed optimizer, their gradients have a part in what these are
scaled by. So their norm travels in the tally of that call: where it is the same on all ranks, somebody has averaged them,
and where it is not, all ranks raise.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from overlap.core.alike import Clipped, NotAveraged
from overlap.core.gates.holders import holders
from overlap.features.clipping import Clippable, clip_together
from overlap.job.axes import axes_of
from overlap.job.session import current, is_initialized

__all__ = ["install"]

_Function = Callable[..., Any]
_Tensors = torch.Tensor | Iterable[torch.Tensor]
_REMEDY = (
    "clip the parameters of each optimizer by themselves, distribute the optimizer of the others, too, or freeze what is "
    "not trained (requires_grad_(False))"
)


class _Distributed(Clippable, Protocol):
    """What is asked of a distributed optimizer."""

    param_groups: list[dict[str, Any]]

    @property
    def _in_shards(self) -> bool: ...
    def _has_local_gradients(self, call: str, clipped: Clipped) -> bool: ...
    def _clip(
        self, wanted: Callable[[torch.Tensor], bool], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor: ...
    def synchronize(self) -> None: ...


def install() -> None:
    """Wrap torch's clipping functions, in this process. Calling it again changes nothing."""
    acts: dict[str, _Function] = {
        "clip_grad_norm_": _norm,
        "clip_grad_value_": _value,
        "get_total_norm": _total,  # this, and the next, since torch 2.6
        "clip_grads_with_norm_": _with_norm,
    }
    for name, act in acts.items():
        function: Any = getattr(torch.nn.utils, name, None)
        if function is None or getattr(function, "_dear", False):
            continue
        original = function.__wrapped__
        cell = next((cell for cell in function.__closure__ or () if cell.cell_contents is original), None)
        if cell is None:  # another torch: reached by its name only
            looking = functools.wraps(function)(functools.partial(_look, act, function))
            setattr(clip_grad, name, looking)
            setattr(torch.nn.utils, name, looking)
            function = looking
        else:
            cell.cell_contents = functools.partial(_look, act, original)
        function._dear = True


class _Inside(threading.local):
    """Whether this thread runs one of torch's functions, which call each other."""

    now = False


_inside = _Inside()


def _look(act: _Function, original: _Function, *args: Any, **named: Any) -> Any:
    if _inside.now or not is_initialized():
        return original(*args, **named)
    return act(original, *args, **named)


@contextmanager
def _as_torch_does() -> Iterator[None]:
    _inside.now = True
    try:
        yield
    finally:
        _inside.now = False


def _norm(
    original: _Function,
    parameters: _Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *args: Any,
    **rest: Any,
) -> torch.Tensor:
    chosen = _listed(parameters)
    optimizers = _having(chosen)
    beside = _beside(chosen, optimizers)
    stranger = _norm_of(beside)
    clipped = _clipped("clip_grad_norm_()", stranger, beside)
    local = [optimizer for optimizer in optimizers if optimizer._has_local_gradients("clip_grad_norm_()", clipped)]
    if len(local) == len(optimizers) == 1 and stranger == 0:  # averages are clipped where they lie
        wanted = {id(parameter) for parameter in chosen}
        return local[0]._clip(lambda param: id(param) in wanted, max_norm, norm_type, error_if_nonfinite)
    if optimizers and axes_of(chosen):  # each rank has a part of the norm, wherever averages lie
        if stranger:
            raise RuntimeError(f"clip_grad_norm_() was given parts of parameters beside gradients of others: {_REMEDY}")
        return clip_together(optimizers, chosen, max_norm, norm_type, error_if_nonfinite)
    if local and len(local) == len(optimizers) and stranger == 0 and all(each._in_shards for each in local):
        return clip_together(local, chosen, max_norm, norm_type, error_if_nonfinite)
    for optimizer in local:
        optimizer.synchronize()
    with _as_torch_does():
        norm: torch.Tensor = original(chosen, max_norm, norm_type, error_if_nonfinite, *args, **rest)
    return norm


def _value(original: _Function, parameters: _Tensors, *args: Any, **rest: Any) -> None:
    chosen = _listed(parameters)
    optimizers = _having(chosen)
    beside = _beside(chosen, optimizers)
    _synchronize(optimizers, "clip_grad_value_()", _clipped("clip_grad_value_()", _norm_of(beside), beside))
    original(chosen, *args, **rest)


def _total(original: _Function, tensors: _Tensors, *args: Any, **rest: Any) -> torch.Tensor:
    """The norm of averages, where gradients of distributed optimizers are among the `tensors`."""
    given = _listed(tensors)
    places = {place for tensor in given for place in _places(tensor)}
    optimizers = _having(_owners(places)) if given else _everyones()
    known = {id(param): param for optimizer in optimizers for param in _params(optimizer)}
    taken = {place for param in known.values() if param.grad is not None for place in _places(param.grad)}
    beside = [tensor for tensor in given if taken.isdisjoint(_places(tensor))]
    # All that this rank has of an optimizer means all that any rank has: others have used other parameters.
    wanted = [_wanted(optimizer, places) for optimizer in optimizers]
    clipped = _clipped("get_total_norm()", _norm_of(beside), beside)
    if axes_of(param for params in wanted for param in params):
        return _of_parts(optimizers, wanted, beside, *args, **rest)
    if _synchronize(optimizers, "get_total_norm()", clipped):
        given = [*(param.grad for params in wanted for param in params if param.grad is not None), *beside]
    norm: torch.Tensor = original(given, *args, **rest)
    return norm


def _of_parts(
    optimizers: Sequence[_Distributed],
    wanted: Sequence[Sequence[torch.Tensor]],
    beside: Sequence[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The norm of averages of parameters of which other ranks have other parts."""
    ids = {id(param) for params in wanted for param in params}
    norms = [each._norm(lambda param: id(param) in ids, norm_type).to(torch.float64) for each in optimizers]
    norms += [torch.linalg.vector_norm(each.detach(), norm_type).double().cpu() for each in beside]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {float(total)}, not finite")
    first = wanted[0][0]
    return total.to(first.device, first.dtype)


def _with_norm(
    original: _Function, parameters: _Tensors, max_norm: float, total_norm: torch.Tensor, *args: Any, **rest: Any
) -> None:
    chosen = _listed(parameters)
    optimizers = _having(chosen)
    if optimizers:
        number = abs(float(total_norm))
        _synchronize(optimizers, "clip_grads_with_norm_()", Clipped(number, functools.partial(_another_norm, number)))
    original(chosen, max_norm, total_norm, *args, **rest)


# - Whose they are


def _listed(tensors: _Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _having(chosen: Sequence[torch.Tensor]) -> list[_Distributed]:
    """The distributed optimizers of `chosen` parameters."""
    return current().registry.having(chosen)


def _everyones() -> list[_Distributed]:
    """A rank without gradients cannot tell whose it has none of, unless there is one optimizer."""
    optimizers = current().registry.optimizers
    return optimizers if len(optimizers) == 1 else []


def _params(optimizer: _Distributed) -> list[torch.Tensor]:
    """Without waiting for what is in transit."""
    return [param for group in optimizer.param_groups for param in list.__iter__(group["params"])]


def _beside(chosen: Sequence[torch.Tensor], optimizers: Iterable[_Distributed]) -> list[torch.Tensor]:
    """Of the `chosen` parameters, those with gradients that belong to none of the `optimizers`, if there are any."""
    held = {id(param) for optimizer in optimizers for param in _params(optimizer)}
    return [param for param in chosen if held and id(param) not in held and param.grad is not None]


def _places(tensor: torch.Tensor) -> tuple[object, ...]:
    """What the same gradient is known by: the object, or where its values lie."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel():
        return id(tensor), (tensor.data_ptr(), tensor.numel())
    return (id(tensor),)


def _owners(places: set[object]) -> list[torch.Tensor]:
    return [
        param
        for optimizer in current().registry.optimizers
        for param in _params(optimizer)
        if param.grad is not None and not places.isdisjoint(_places(param.grad))
    ]


def _wanted(optimizer: _Distributed, places: set[object]) -> list[torch.Tensor]:
    own = _params(optimizer)
    given = [param for param in own if param.grad is not None and not places.isdisjoint(_places(param.grad))]
    return own if len(given) == sum(param.grad is not None for param in own) else given


# - What is agreed on


def _norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """Of what parameters have in ``.grad``, or of gradients."""
    found = 0.0
    for tensor in tensors:
        gradient = tensor if tensor.grad is None else tensor.grad
        values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
        if values.numel():
            found += float(torch.linalg.vector_norm(values)) ** 2
    return found**0.5


def _clipped(call: str, norm: float, beside: Sequence[torch.Tensor]) -> Clipped:
    """See [Note: strangers]."""
    return Clipped(norm, functools.partial(_not_averaged, call, beside) if beside else None)


def _not_averaged(call: str, beside: Sequence[torch.Tensor]) -> NotAveraged:
    more = f" and of {len(beside) - 1} more" if len(beside) > 1 else ""
    return NotAveraged(
        f"{call} was given gradients that nobody averages together with those of a distributed optimizer, so each rank "
        f"would clip by a norm of its own: the gradient of {_name(beside[0])}{more} is in no distributed optimizer, and "
        f"differs between ranks; {_REMEDY}"
    )


def _another_norm(mine: float) -> NotAveraged:
    return NotAveraged(
        f"clip_grads_with_norm_() was given another total_norm on other ranks than on this one ({mine:g}), so each would "
        "scale the averages by a factor of its own; have it from torch.nn.utils.get_total_norm(), called on every rank"
    )


def _name(tensor: torch.Tensor) -> str:
    """Of a parameter, or of the one whose gradient it is; looks at every object of this process."""
    parameter: torch.Tensor = tensor
    if not isinstance(tensor, torch.nn.Parameter):
        everyones = (thing for thing in gc.get_objects() if type(thing) is torch.nn.Parameter)
        parameter = next((param for param in everyones if param.grad is tensor), tensor)
    for module in reversed(holders([parameter])):
        for path, part in module.named_modules():
            for name, param in dict.items(part._parameters):
                if param is parameter:
                    return f"{f'{path}.{name}'.strip('.')!r} of a {type(module).__name__}, {tuple(tensor.shape)},"
    return f"a tensor of shape {tuple(tensor.shape)}"


def _synchronize(optimizers: Iterable[_Distributed], call: str, clipped: Clipped) -> bool:
    """Have averages in every ``.grad``; whether some were local before. On every rank."""
    local = [optimizer for optimizer in optimizers if optimizer._has_local_gradients(call, clipped)]
    for optimizer in local:
        optimizer.synchronize()
    return bool(local)
