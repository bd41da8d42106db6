"""Where tensors lie that a script makes while a model is constructed: on the meta device, unless it names another one.

Their ``device`` reads as the CPU, where their values will be, so code that looks at it takes the path that it would take
with real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from overlap.state.recording import META, Recorder, become, deferred, found_in, values_of
from overlap.state.replay import CPU, changed

__all__ = ["Placement"]

# What ``tensor.device`` gives for deferred tensors. Factories know it by identity: a script that asks for the CPU in
# words gets real tensors.
_HERE = torch.device("cpu")

_FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        *("arange", "bartlett_window", "blackman_window", "empty", "empty_permuted", "empty_strided", "eye", "full"),
        *("hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "ones", "rand", "randint", "randn"),
        *("randperm", "tril_indices", "triu_indices", "zeros"),
    )
)
_LIKE = frozenset(
    getattr(torch, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
)
_ALIASES = frozenset({torch.as_tensor, torch.asarray})
_DATA = _ALIASES | {torch.tensor}
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ARRAYS = frozenset({torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr})


class Placement(TorchFunctionMode):
    """Factories make deferred tensors, unless the script names a device. Tensors from data are real.

    What would need the memory of a deferred tensor raises ``RuntimeError``.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        subject = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if subject is not None and func in _ANSWERS and deferred(subject):
            return _ANSWERS[func](subject, args, kwargs)
        if func == _SET_DATA and (found_in(args[0]) is None) != (found_in(args[1]) is None):
            return become(args[0], args[1])
        if func in _ALIASES and found_in(args[0]):
            return args[0].to(kwargs.get("dtype") or args[0].dtype)
        if func in _DATA:
            args, kwargs = changed(_number, (args, kwargs))
        if func is torch.Tensor.to:
            args, kwargs = _to(args, kwargs)
        with self._call(self._fate(func, args, kwargs)):
            return func(*args, **kwargs)

    def _fate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Chooses the device in `kwargs`, and gives `Recorder.fate`."""
        device = kwargs.get("device")
        if device is None:
            makes = func in _FACTORIES or (func is torch.normal and (len(args) > 2 or "size" in kwargs))
            if makes and kwargs.get("out") is None:
                kwargs["device"] = META
            return None
        if func in _LIKE and torch.device(device).type == "cpu" and _is_meta(args[0]):
            kwargs["device"] = META  # module.to_empty(device="cpu"), which skip_init() calls
            return True
        if device is _HERE:
            kwargs["device"] = CPU if func in _DATA else META
            return None
        return False if torch.device(device).type == "meta" else None

    @contextmanager
    def _call(self, fate: bool | None) -> Iterator[None]:
        before, recorder = self._recorder.fate, self._recorder
        recorder.depth += 1
        recorder.fate = fate if fate is not None else before
        try:
            yield
        finally:
            recorder.depth -= 1
            recorder.fate = before


def _is_meta(value: Any) -> bool:
    with torch._C.DisableTorchFunction():
        return isinstance(value, torch.Tensor) and value.is_meta


def _number(value: Any) -> Any:
    """What ``torch.tensor([…])`` makes of a deferred tensor in its data."""
    return values_of(value) if found_in(value) else value


def _to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``tensor.to(…)``, so that a deferred tensor, or one that meets it, stays where it is."""
    tensor, *rest = args
    if rest and found_in(rest[0]):
        rest[0] = rest[0].dtype
    if found_in(tensor) is None:
        return (tensor, *rest), kwargs
    if rest and isinstance(rest[0], (str, torch.device)) and torch.device(rest[0]).type == "cpu":
        rest = rest[1:] if len(rest) > 1 and not isinstance(rest[1], bool) else [None, *rest[1:]]
        rest[0] = rest[0] or kwargs.pop("dtype", None) or tensor.dtype
    elif kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
        del kwargs["device"]
        if not rest:
            kwargs["dtype"] = kwargs.get("dtype") or tensor.dtype
    return (tensor, *rest), kwargs


def _refuse(tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        f"a tensor of shape {tuple(tensor.shape)} has no memory inside deferred_init(), and so no NumPy array or address; "
        "make it with device='cpu', or outside of deferred_init()"
    )


_ANSWERS: dict[Any, Callable[[torch.Tensor, tuple[Any, ...], dict[str, Any]], Any]] = {
    _DEVICE: lambda tensor, args, kwargs: _HERE,
    _IS_META: lambda tensor, args, kwargs: False,
    _IS_CPU: lambda tensor, args, kwargs: True,
    torch.Tensor.cpu: lambda tensor, args, kwargs: tensor,
    torch.Tensor.__format__: lambda tensor, args, kwargs: format(values_of(tensor), *args[1:]),
    torch.Tensor.tolist: lambda tensor, args, kwargs: values_of(tensor).tolist(),
    torch.Tensor.new_tensor: lambda tensor, args, kwargs: torch.tensor(*args[1:], **{"dtype": tensor.dtype, **kwargs}),
    **dict.fromkeys(_ARRAYS, _refuse),
}
