"""fairscale's ways to wrap parts of a model: by hand, inside ``enable_wrap()``, and by a policy of size or of marks."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fsdp.fairscale import FullyShardedDataParallel

__all__ = ["auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "enable_wrap", "wrap"]

_Policy = Callable[..., bool]

_EXCLUDED = frozenset({torch.nn.ModuleList, torch.nn.ModuleDict})
_LEAVES = frozenset({torch.nn.MultiheadAttention})


def default_auto_wrap_policy(
    module: torch.nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool = False,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[torch.nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[torch.nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Whether to look into `module` (with `recurse`), or to wrap it, by the number of its elements that are not wrapped.

    Args:
        unwrapped_params: elements of parameters that no wrapper inside has so far.
        module_is_root: it is what :func:`auto_wrap` was given.
        min_num_params: so many elements make a wrapper.
        force_leaf_modules: classes that are not looked into; None: ``MultiheadAttention``.
        exclude_wrap_modules: classes that are not wrapped; None: ``ModuleList`` and ``ModuleDict``, which have no forward.
        skip_params_check_for_root: wrap what :func:`auto_wrap` was given, however few elements are left.
    """
    enough = unwrapped_params >= min_num_params
    if recurse:
        return enough and not isinstance(module, tuple(_LEAVES if force_leaf_modules is None else force_leaf_modules))
    excluded = tuple(_EXCLUDED if exclude_wrap_modules is None else exclude_wrap_modules)
    return (enough or (module_is_root and skip_params_check_for_root)) and not isinstance(module, excluded)


def config_auto_wrap_policy(
    module: torch.nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool = False
) -> bool:
    """Wrap the modules that have an attribute ``wrapper_config``, with the arguments in it, and look into all."""
    return recurse or hasattr(module, "wrapper_config")


class _Context(NamedTuple):
    policy: _Policy
    wrapper: Callable[..., torch.nn.Module]
    config: Mapping[str, Any]


_context: contextvars.ContextVar[_Context | None] = contextvars.ContextVar("enable_wrap", default=None)


@contextlib.contextmanager
def enable_wrap(
    auto_wrap_policy: _Policy | None = None,
    wrapper_cls: Callable[..., torch.nn.Module] = FullyShardedDataParallel,
    **config: Any,
) -> Iterator[None]:
    """A context in which :func:`wrap` and :func:`auto_wrap` wrap, by ``wrapper_cls(module, **config)``.

    Args:
        auto_wrap_policy: that of :func:`auto_wrap` calls without one; None: :func:`default_auto_wrap_policy`.
        wrapper_cls: a class, or a function that returns the wrapper of a module.
        config: its arguments.

    Another one inside replaces it until it ends. It is this thread's.
    """
    if config.pop("move_module_cuda_half", False):
        raise NotImplementedError(
            "move_module_cuda_half=True: modules are wrapped where they are; move the model first, leave it out, and for "
            "16 bits give mixed_precision=True"
        )
    policy = default_auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy
    token = _context.set(_Context(policy, wrapper_cls, config))
    try:
        yield
    finally:
        _context.reset(token)


def wrap(module: torch.nn.Module, **overrides: Any) -> torch.nn.Module:
    """Wrap `module` inside :func:`enable_wrap`; outside, return it unchanged.

    Of the context's arguments, ``module.wrapper_config``, and `overrides`, the later ones count.
    """
    context = _context.get()
    if context is None:
        return module
    return context.wrapper(module, **_arguments(context, module, overrides))


def auto_wrap(module: torch.nn.Module, auto_wrap_policy: _Policy | None = None, **overrides: Any) -> torch.nn.Module:
    """Wrap the parts of `module`, and itself, that `auto_wrap_policy` chooses; outside :func:`enable_wrap`, none.

    Args:
        module: has no wrapper inside so far: ``ValueError``. Its parts are replaced in place.
        auto_wrap_policy: called by name with `module`, `recurse`, `unwrapped_params`, and `module_is_root` if it takes
            that; see :func:`default_auto_wrap_policy`. None: the context's.
        overrides: arguments of all wrappers, which replace those of the context.

    Returns the wrapper of `module`, or `module` where the policy leaves it out. What is left in it then is sharded all the
    same, and its gradients are averaged.
    """
    context = _context.get()
    if context is None:
        return module
    kind = context.wrapper
    for name, part in module.named_modules():
        if isinstance(kind, type) and isinstance(part, kind):
            raise ValueError(
                f"auto_wrap() was given a module with a wrapper inside, {name!r}: wrap it once, or mark the parts with "
                "wrapper_config and take config_auto_wrap_policy"
            )
    policy = context.policy if auto_wrap_policy is None else auto_wrap_policy
    wrapped, count = _wrapped(module, _called_with_root(policy), overrides, root=True)
    if count and wrapped is module and isinstance(kind, type) and issubclass(kind, FullyShardedDataParallel):
        kind.shard_rest(module, **_arguments(context, module, overrides))
    return wrapped


def _wrapped(
    module: torch.nn.Module, policy: _Policy, overrides: Mapping[str, Any], root: bool
) -> tuple[torch.nn.Module, int]:
    """The wrapper of `module`, or itself, and how many elements are in wrappers."""
    total = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, unwrapped_params=total, module_is_root=root):
        return module, 0
    inside = 0
    for name, part in list(module.named_children()):
        replaced, count = _wrapped(part, policy, overrides, root=False)
        if replaced is not part:
            setattr(module, name, replaced)
        inside += count
    if policy(module=module, recurse=False, unwrapped_params=total - inside, module_is_root=root):
        return wrap(module, **overrides), total
    return module, inside


def _arguments(context: _Context, module: torch.nn.Module, overrides: Mapping[str, Any]) -> dict[str, Any]:
    marked = getattr(module, "wrapper_config", {})
    if not isinstance(marked, Mapping):
        raise TypeError(f"wrapper_config of {type(module).__name__} should be a dictionary and is {marked!r}")
    return {**context.config, **marked, **overrides}


def _called_with_root(policy: _Policy) -> _Policy:
    """`policy`, which may be one for older versions, without `module_is_root`."""
    known = inspect.signature(policy).parameters.values()
    if any(each.name == "module_is_root" or each.kind is each.VAR_KEYWORD for each in known):
        return policy

    def asked(module_is_root: bool, **given: Any) -> bool:
        return policy(**given)

    return asked
