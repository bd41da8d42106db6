"""The class that a module has after ``fully_shard()``: its own, with the methods that torch adds to it."""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fsdp.first_pass import begin
from fsdp.units import Root, Unit, attributes_of, has_unit, outermost, root_of, unit_of, units_in
from overlap.core.gates.compiled_calls import CompiledCalls
from overlap.plan.plan import Residency

__all__ = ["FSDPModule", "as_type", "compiled_calls", "register_fsdp_forward_method", "sharded_class"]


class FSDPModule(torch.nn.Module):
    """What :func:`fully_shard` adds to a module's class: torch's methods. On every rank, between passes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = unit_of(self)
        if torch.compiler.is_dynamo_compiling():
            args, kwargs = _traced_inputs(unit, args, kwargs)
            return super().__call__(*args, **kwargs)
        if not unit.optimizers:
            begin(self)
        args, kwargs = _cast_inputs(unit, args, kwargs)
        unit.calls += 1
        try:
            return super().__call__(*args, **kwargs)
        finally:
            unit.calls -= 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain modules."""
        return copyreg._reconstructor, (unit_of(self).kind, object, None), attributes_of(self)  # type: ignore[attr-defined]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """With False, gradients of backward passes add up on this rank, whole; with True, the next pass reduces them."""
        if not recurse:
            raise NotImplementedError(
                "set_requires_gradient_sync(recurse=False): all modules of a model are reduced, or none; leave recurse out"
            )
        _root_of(self, "set_requires_gradient_sync").sync(requires_gradient_sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Does nothing: backward never waits for reductions."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change `reshard_after_forward` of this module, and with `recurse` of those in it, from the next pass on."""
        residency = Residency.FREED if reshard_after_forward else Residency.FREED_AFTER_BACKWARD
        for unit in units_in([self]) if recurse else [unit_of(self)]:
            unit.stays, unit.post_forward = not reshard_after_forward, None
            mine = set(map(id, unit.parameters))
            for each in unit.optimizers:
                each._engine.unsharder.reside(residency, lambda parameter, mine=mine: id(parameter) in mine)  # type: ignore[misc]

    def set_modules_to_forward_prefetch(self, modules: Sequence[torch.nn.Module]) -> None:
        """Does nothing: what is gathered ahead follows from the order of use, within a bound on memory."""

    def set_modules_to_backward_prefetch(self, modules: Sequence[torch.nn.Module]) -> None:
        """Does nothing, as :meth:`set_modules_to_forward_prefetch`."""


# What torch has on its modules and this has not, and why, or what to do instead.
_NOT_BUILT = {
    "unshard": "parameters are gathered ahead by the plan; to read or write them, use `with dear.whole(model):`",
    "reshard": "parameters are freed by the plan; set_reshard_after_forward(True) frees them after forward",
    "reset_iter_state": "after an exception in a pass, make the model and the optimizer again, from a checkpoint",
    "set_requires_all_reduce": "gradients are reduced in one operation; set_requires_gradient_sync() puts that off",
    "set_reshard_after_backward": "parameters are freed when backward has used them",
    "set_gradient_divide_factor": "gradients are averaged; multiply the loss by size / factor",
    "set_reduce_scatter_divide_factor": "gradients are averaged; multiply the loss by size / factor",
    "set_force_sum_reduction_for_comms": "gradients are averaged; multiply the loss by the number of ranks for a sum",
    "set_unshard_in_backward": "every bucket is gathered in backward, for all ranks",
    "set_post_optim_event": "gathers follow the stream that step() was called on",
    "set_custom_all_gather": "operations are the library's own",
    "set_custom_reduce_scatter": "operations are the library's own",
    "set_all_reduce_hook": "gradients are reduced in one operation",
    "set_reduce_scatter_unused_params": "it is always so, and what no rank has used has no gradient",
    "set_reduce_scatter_max_input_buffers": "gradients on their way are bounded by the size of four buckets",
    "set_separate_reduce_scatter_group": "it is always so",
    "set_allocate_memory_from_process_group_for_comm": "memory is the library's own",
    "set_symm_mem_for_comm": "memory is the library's own",
}


def _refused(name: str, why: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"{name}(): {why}")

    return refuse


for _name, _why in _NOT_BUILT.items():
    setattr(FSDPModule, _name, _refused(_name, _why))


def _root_of(module: Any, call: str) -> Root:
    model = outermost(module)
    if model is not module:
        raise NotImplementedError(
            f"{call}() of {type(module).__name__}, which is inside of {type(model).__name__}: call it on that"
        )
    return root_of(model)


@functools.cache
def sharded_class(kind: Any) -> type[FSDPModule]:
    """A class like `kind`, of modules, with the methods of :class:`FSDPModule`; torch's have the same name."""
    forward = kind.forward

    @functools.wraps(forward)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _as_forward(self, functools.partial(forward, self), args, kwargs)

    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"forward": called, "__module__": kind.__module__})


def register_fsdp_forward_method(module: torch.nn.Module, method_name: str) -> None:
    """Let `method_name` of `module` use the module's own parameters, as its ``forward()`` does; as in torch.

    Raises ``ValueError`` for a module that was not given to :func:`fully_shard`.
    """
    if not isinstance(module, FSDPModule):
        raise ValueError(f"{type(module).__name__} was not given to fully_shard()")
    method, reference = getattr(module, method_name), weakref.ref(module)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        mine = reference()
        return _as_forward(mine, functools.partial(method.__func__, mine), args, kwargs)

    setattr(module, method_name, called)


def _as_forward(module: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `method` of `module`, which uses its parameters, where the script has not called the module."""
    if torch.compiler.is_dynamo_compiling():
        return method(*args, **kwargs)
    unit = unit_of(module)
    if not unit.calls and not unit.optimizers:
        begin(module)
    engines = [each._engine for each in unit.optimizers]
    if unit.calls or not engines:
        return method(*args, **kwargs)
    args, kwargs = _cast_inputs(unit, args, kwargs)
    output = None
    unit.calls += 1
    for engine in engines:
        engine.enter(module, args)
    try:
        output = method(*args, **kwargs)
    finally:
        unit.calls -= 1
        for engine in engines:
            engine.leave(module, args, output)
    return output


def _cast_inputs(unit: Unit, args: Any, kwargs: Any) -> Any:
    """The arguments of a forward pass of the module of `unit`, in the type in which it computes."""
    if not unit.casts or not unit.optimizers or any(each._engine.unsharder.whole_now for each in unit.optimizers):
        return args, kwargs
    return as_type(unit.param_dtype, (args, kwargs))


def _traced_inputs(unit: Unit, args: Any, kwargs: Any) -> Any:
    """What :func:`_cast_inputs` gives, where a compiler traces the call of the module of `unit`."""
    if not unit.casts or unit.root is None or not unit.root._optimizers:
        return args, kwargs
    if len(unit.parameters) > 0 and unit.parameters[0].dtype is not unit.param_dtype:  # inside ``dear.whole(model)``
        return args, kwargs
    return as_type(unit.param_dtype, (args, kwargs))


def _begin_compiled(module: Any, _inputs: Any) -> None:
    units = units_in([module])
    if units and not units[0].optimizers:
        begin(next(each for each in module.modules() if has_unit(each)))


@functools.cache
def compiled_calls() -> CompiledCalls:
    """Shards models in whose first training pass compiled code is called, before that is: it would be traced otherwise."""
    return CompiledCalls(_begin_compiled, lambda *_: None, lambda module: bool(units_in([module])))


def as_type(dtype: torch.dtype | None, values: Any) -> Any:
    """`values`, with all floating-point tensors in them, at any depth, as `dtype`."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tree_map(cast, values)
