"""``deferred_init()``: a model is constructed without memory, and gets its values later, tensor by tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from overlap.state import recording
from overlap.state.placement import Placement
from overlap.state.recording import Recorder, become, deferred
from overlap.state.replay import Memory, leaves, real_view, silence, view_of

__all__ = [
    "become",
    "check",
    "deferred_init",
    "give_values",
    "is_deferred",
    "materialize",
    "move",
    "postpone",
    "storage_of",
    "tensors_of",
    "values_of",
]

_here = threading.local()
_VERSION = "_dear_deferred_version"
Target = TypeVar("Target", torch.nn.Module, torch.Tensor)


@contextmanager
def deferred_init() -> Iterator[None]:
    """A context in which tensors take no memory: a model is constructed on torch's meta device.

    ``materialize()`` gives them afterwards, bit for bit, the values that they would have without the context. The generator
    moves as it would without it. Tensors from data (``torch.tensor``, ``torch.from_numpy``) are real, and so are those
    whose device is named. Reading single values (``.item()``, a condition) works, and computes them.

    Anything that changes a model's values belongs inside. Not on any rank in particular; each that constructs the model in
    it, with the same seed, has the same values. Raises ``RuntimeError`` if the default device is not the CPU, and for what
    needs the memory of a deferred tensor, such as ``.numpy()``.
    """
    if getattr(_here, "active", False):
        yield
        return
    if torch.get_default_device().type != "cpu":
        raise RuntimeError(
            f"deferred_init() computes values on the CPU, and the default device is {torch.get_default_device()}; "
            "construct the model without torch.set_default_device(), and move it when it has its values"
        )
    registered: list[torch.Tensor] = []

    def note(module: torch.nn.Module, name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            registered.append(tensor)

    handles = [register_module_parameter_registration_hook(note), register_module_buffer_registration_hook(note)]
    recorder = Recorder()
    try:
        _here.active = True
        with recorder, Placement(recorder):
            yield
    finally:
        _here.active = False
        for handle in handles:
            handle.remove()
        for tensor in registered:
            if deferred(tensor):
                setattr(tensor, _VERSION, tensor._version)


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was made inside ``deferred_init()`` and has no values yet."""
    return deferred(tensor) is not None


def values_of(tensor: torch.Tensor, name: str = "a tensor") -> torch.Tensor:
    """The values of a deferred `tensor`: a new tensor on the CPU, which nothing else holds. `tensor` stays as it is.

    Takes memory for `tensor` and for what its values are computed from: nothing for random and constant values, the
    original for a copy. A real tensor is given back as it is. Raises ``RuntimeError``, with `name`, for a tensor of others
    on the meta device, and for one that was written to since ``deferred_init()`` ended.
    """
    if tensor.device.type != "meta":
        return tensor
    check(tensor, name)
    return recording.values_of(tensor)


def postpone(tensor: torch.Tensor, stand_in: torch.Tensor, name: str = "a tensor") -> Callable[[], torch.Tensor]:
    """Give a deferred `tensor` the memory of `stand_in`, and return what gives its values, as ``values_of()`` does.

    Raises ``RuntimeError`` as that.
    """
    check(tensor, name)
    found = deferred(tensor)
    assert found is not None
    view = view_of(tensor, found.memory, None)
    become(tensor, stand_in)
    vars(tensor).pop(_VERSION, None)

    def values() -> torch.Tensor:
        with silence():
            return real_view(view, found.storage())

    return values


def materialize(target: Target) -> Target:
    """Gives `target`, a tensor or all tensors of a module, their values, and returns it.

    The module may be a part of a model. Tensors stay the same objects, so optimizers that hold them, ties, and shared
    memory stay as they are; hooks, too. Covers parameters, buffers, and tensors in other attributes of modules. Peak memory
    is that of the values, and of the largest tensor that some are computed from. What is real stays as it is.

    Raises ``RuntimeError`` as ``values_of`` does, before anything has changed.
    """
    give_values(tensors_of(target))
    return target


def give_values(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """:func:`materialize` for `tensors`, which have these names in errors."""
    waiting = [(name, tensor) for name, tensor in tensors if tensor.device.type == "meta"]
    for name, tensor in waiting:
        check(tensor, name)
    # Results of computations first: they hold on to the parameters that they were computed from.
    for _, tensor in sorted(waiting, key=lambda item: item[1].is_leaf):
        found = deferred(tensor)
        assert found is not None
        with silence():
            found.real = found.real or found.storage()
            become(tensor, real_view(view_of(tensor, found.memory, None), found.real))
        vars(tensor).pop(_VERSION, None)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory of `tensor`; of a deferred one, new memory with its values."""
    found = deferred(tensor)
    if found is None:
        return tensor.untyped_storage()
    with silence():
        return found.real or found.storage()


def move(tensors: Iterable[torch.Tensor], storage: torch.UntypedStorage) -> None:
    """Give all `tensors` over one memory, which may be deferred, their places in `storage`, which is as large."""
    for tensor in tensors:
        view = real_view(view_of(tensor, Memory(0), None), storage)
        if tensor.device.type == "meta":
            become(tensor, view)
            vars(tensor).pop(_VERSION, None)
        else:
            tensor.data = view


def tensors_of(target: torch.nn.Module | torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The parameters, buffers and other tensors of a module with their names, each once; or the tensor."""
    if isinstance(target, torch.Tensor):
        return [("a tensor", target)]
    named = [*target.named_parameters(), *target.named_buffers()]
    for path, part in target.named_modules():
        for name, value in vars(part).items():
            label = f"{path}.{name}".lstrip(".")
            named += [(label, leaf) for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    return list({id(tensor): (name, tensor) for name, tensor in reversed(named)}.values())[::-1]


def check(tensor: torch.Tensor, name: str) -> None:
    """Raise ``RuntimeError``, with `name`, for a tensor on the meta device that has no values that could be computed."""
    with silence():
        shape, version = tuple(tensor.size()), tensor._version
    if deferred(tensor) is None:
        raise RuntimeError(
            f"{name}, of shape {shape}, is on the meta device and has no values: it was made, or changed its type, outside "
            "of deferred_init(); do that inside, or after dear.materialize()"
        )
    writes = version - vars(tensor).get(_VERSION, version)
    if writes:
        raise RuntimeError(
            f"{name}, of shape {shape}, was written to after deferred_init() had ended, which has no effect as it has no "
            "memory; write to it inside, or after dear.materialize()"
        )
