"""Records how tensors without memory get their values, while a model is constructed.

Random operations run at once on memory that is thrown away, so the generator moves as with real tensors. What a script
reads (``.item()``, a condition) is computed at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overlap.state.replay import (
    CPU,
    Memory,
    Operation,
    Recent,
    changed,
    leaves,
    passing,
    real_view,
    replay,
    silence,
    silent,
    view_of,
)

__all__ = ["META", "Deferred", "Recorder", "become", "deferred", "found_in", "values_of"]

META = torch.device("meta")
_LOOP = 32  # operations, after which computed values are let go
_ATTRIBUTE = "_dear_deferred"

_aten: Any = torch.ops.aten
# By the name of the operation. These write every element of their first argument without reading it …
_OVERWRITE = frozenset(
    ("fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_")
    + ("log_normal_",)
)
# … these read nothing but the shape of it …
_SHAPE_ONLY = frozenset(
    [f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")]
    + [f"new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full")]
)
# … and the results of these have no values yet.
_UNWRITTEN = frozenset(("empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided"))
# These are recorded as what fills an empty tensor, which may then lie where we want it.
_FILLING: dict[Any, tuple[Any, tuple[Any, ...]]] = {
    _aten.rand: (_aten.uniform_.default, (0.0, 1.0)),
    _aten.randn: (_aten.normal_.default, (0.0, 1.0)),
    _aten.clone: (_aten.copy_.default, ()),
    _aten._to_copy: (_aten.copy_.default, ()),
}
# The schema does not say that these write to running statistics: arguments 3 and 4.
_RUNNING = (_aten.native_batch_norm.default,)
_BY_VALUE = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


class Deferred:
    """What is known of a storage on the meta device: the last operation that wrote to it, and its real one once made."""

    __slots__ = ("__weakref__", "memory", "real", "writer")

    def __init__(self, memory: Memory, writer: Operation | None) -> None:
        self.memory = memory
        self.writer = writer
        me = weakref.ref(self)  # operations hold on to `memory`, and must not to later ones
        memory.latest = lambda: getattr(me(), "writer", None)
        self.real: torch.UntypedStorage | None = None

    def storage(self) -> torch.UntypedStorage:
        """A new storage with its values."""
        return replay(self.memory, self.writer, passes=False)


def deferred(tensor: torch.Tensor) -> Deferred | None:
    """What is recorded of `tensor`; None for real tensors, and for those of others on the meta device."""
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "meta" or tensor.layout != torch.strided:
            return None
        return getattr(tensor.untyped_storage(), _ATTRIBUTE, None)


def values_of(tensor: torch.Tensor, recent: Recent | None = None) -> torch.Tensor:
    """The values of `tensor`, which is deferred, as a new tensor. Nobody but `recent` holds it."""
    found = deferred(tensor)
    assert found is not None
    with silence():
        storage = replay(found.memory, found.writer, True, recent)
        return real_view(view_of(tensor, found.memory, None), storage)


def become(tensor: torch.Tensor, real: torch.Tensor) -> None:
    """Gives `tensor` the memory of `real`, of the same shape and dtype, on whatever device.

    ``tensor.data = real`` would do the same, but refuses another device. The Python object stays, with its class,
    attributes, hooks and weak references. A leaf keeps ``requires_grad``; the result of a computation becomes a leaf.
    """
    with silence():
        fresh = real.detach().requires_grad_(tensor.requires_grad and tensor.is_leaf)
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        torch._C._swap_tensor_impl(tensor, fresh)  # type: ignore[attr-defined]
        if fresh.is_leaf:
            tensor._backward_hooks = hooks[0]
            tensor._post_accumulate_grad_hooks = hooks[1]  # type: ignore[attr-defined]


class Recorder(TorchDispatchMode):
    """Records operations that make or write deferred tensors. `depth`: how many calls of the script's functions this is in.

    `fate` is of meta tensors that the present call makes from nothing: None if they are deferred, False if the script asked
    for the meta device, True if they are deferred even if they are made after the shape of such a one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.fate: bool | None = None
        self._state: torch.Tensor | None = None
        self._spare: torch.UntypedStorage | None = None
        # A loop that samples until a condition holds, as in trunc_normal_, asks again after a few operations more.
        self._recent: Recent = {}
        self._age = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if silent():
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = [tensor for tensor in tensors if deferred(tensor)]
        device, name = kwargs.get("device"), func.overloadpacket.__name__
        if not known:
            if self.depth == 0 and name == "empty" and device in (None, CPU):
                device = kwargs["device"] = META  # torch.Tensor(2, 3): constructors of old are no functions
            strange = any(tensor.is_meta for tensor in tensors)
            if device != META or self.fate is False or (strange and not self.fate):
                return func(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        if any(tensor.is_meta and not deferred(tensor) for tensor in tensors) and name not in _SHAPE_ONLY:
            raise NotImplementedError(f"{name}: a tensor on the meta device has no values that could be used")
        if any(not tensor.is_meta for tensor in written):
            return self._really(func, args, kwargs)
        if device is not None and device != META:
            if name != "_to_copy":
                return self._really(func, args, kwargs)
            if device.type != "cpu":
                raise RuntimeError(
                    f"a deferred tensor cannot go to {device} yet; leave deferred_init(), call "
                    "dear.materialize(model), and move the model then"
                )
            kwargs["device"] = META
        if func.overloadpacket in _FILLING and kwargs.get("layout") in (None, torch.strided):
            return self._filled(func, args, kwargs)
        return self._record(func, name, args, kwargs, written)

    def _filled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Runs an operation as one that fills an empty tensor."""
        filler, numbers = _FILLING[func.overloadpacket]
        generator = kwargs.pop("generator", None)
        if filler is _aten.copy_.default:
            empty = func(_on_meta(args[0]), *args[1:], **kwargs)
            numbers = (args[0],)
        else:
            empty = torch.empty(args[0], dtype=kwargs.get("dtype"), device=META)
        storage = empty.untyped_storage()
        setattr(storage, _ATTRIBUTE, Deferred(Memory(storage.nbytes()), None))
        with_generator = {} if generator is None else {"generator": generator}
        return self._record(filler, filler.overloadpacket.__name__, (empty, *numbers), with_generator, [empty])

    def _record(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]
    ) -> Any:
        """Runs an operation whose results are deferred."""
        self._age += 1
        if self._age > _LOOP:
            self._recent.clear()
        rest = [found.memory for found in map(found_in, leaves((args[1:], kwargs))) if found]
        unread = None
        if name in _OVERWRITE | _SHAPE_ONLY and (found := found_in(args[0])) and found.memory not in rest:
            unread = args[0]
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        blank = unread if name in _SHAPE_ONLY or (unread is not None and _fills(unread)) else None
        kept_args, kept_kwargs = _kept(args, kwargs, blank)
        operation = Operation(func, kept_args, kept_kwargs, self._generator(kwargs) if seeded else None)
        if seeded or _BY_VALUE & set(func.tags) or func is _aten._local_scalar_dense.default:
            out = self._really(func, args, kwargs, unread)
        else:
            try:
                meta_args, meta_kwargs = changed(_on_meta, (args, kwargs))
                out = func(*meta_args, **meta_kwargs)
            except NotImplementedError:  # on the meta device
                out = self._really(func, args, kwargs, unread)
        for number, leaf in enumerate(leaves(out)):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta and not deferred(leaf):
                storage = leaf.untyped_storage()
                found = Deferred(Memory(storage.nbytes()), None if name in _UNWRITTEN else operation)
                setattr(storage, _ATTRIBUTE, found)
                if found.writer:
                    operation.results[number] = view_of(leaf, found.memory, None)
        for tensor in written:
            found = deferred(tensor)
            assert found is not None
            found.writer = operation
            found.memory.nbytes = max(found.memory.nbytes, tensor.untyped_storage().nbytes())
        return out

    def _generator(self, kwargs: dict[str, Any]) -> torch.Tensor:
        """The state of the generator that is used next. Equal ones in succession are the same object."""
        generator = kwargs.get("generator") or torch.default_generator
        state = generator.get_state()
        if self._state is None or not torch.equal(self._state, state):
            self._state = state
        return self._state

    def _scratch(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Memory for values that nobody will see, the same for all tensors."""
        span = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        needed = (span + 1) * tensor.element_size()
        if self._spare is None or self._spare.nbytes() < needed:
            self._spare = None  # freed before a larger one is made
            self._spare = passing(needed)
        return self._spare

    def _really(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], unread: Any = None) -> Any:
        """Runs `func` on real tensors, and gives meta tensors for those that it makes, unless it writes to real ones.

        The tensor `unread` gets memory without values.
        """
        stands_for: dict[int, torch.Tensor] = {}

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_meta:
                return value
            if value is unread:
                made = real_view(view_of(value, Memory(0), None)._replace(offset=0), self._scratch(value))
            else:
                made = values_of(value, None if func._schema.is_mutable else self._recent)
                self._age = 0
            stands_for[id(made)] = value
            return made

        device = kwargs.get("device")
        with silence():
            real_args, real_kwargs = changed(real, (args, kwargs))
            if device == META:
                real_kwargs["device"] = CPU
            out = func(*real_args, **real_kwargs)

            def meta(value: Any) -> Any:
                if not isinstance(value, torch.Tensor) or id(value) in own:
                    return value
                if id(value) in stands_for:
                    return stands_for[id(value)]
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)

            own = {id(leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            return out if device is not None and device != META else changed(meta, out)


def _kept(args: tuple[Any, ...], kwargs: dict[str, Any], blank: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments to keep: deferred tensors as Views, real ones as copies, as both may be written to later.

    Earlier values of `blank` do not matter.
    """

    def kept(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = deferred(value)
        if found is None:
            # Only a shape can be of interest in a strange meta tensor.
            return torch.empty_like(value, device="cpu") if value.is_meta else value.detach().clone()
        return view_of(value, found.memory, None if value is blank else found.writer)

    return changed(kept, (args, kwargs))


def _on_meta(value: Any) -> Any:
    return value.to(META) if isinstance(value, torch.Tensor) and not value.is_meta else value


def found_in(value: Any) -> Deferred | None:
    """What is recorded of `value`, if that is a deferred tensor."""
    return deferred(value) if isinstance(value, torch.Tensor) else None


def _fills(tensor: torch.Tensor) -> bool:
    """Whether writing every element of `tensor` writes all of its storage."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that `func` writes to."""
    if func in _RUNNING:
        yield from (tensor for tensor in args[3:5] if isinstance(tensor, torch.Tensor))
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))
