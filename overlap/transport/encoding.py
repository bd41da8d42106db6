"""Encodes values as bytes and back: plain data, decoded without running anything that the bytes name.

A letter may come from whoever reaches the port of torchrun's store, so it is not unpickled. It holds what JSON holds, and
tuples, sets, byte strings, dictionaries with any keys, tensors, arrays, dtypes, and the dataclasses and enums that our own
modules have registered with :func:`travels`. Everything else, a user's own object for instance, raises where it is sent.

    header length (8 bytes, little endian) | header (JSON) | contents of tensors, arrays and byte strings, one by one
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import torch

__all__ = ["NotData", "can_travel", "decode", "encode", "travels"]

C = TypeVar("C", bound=type)

_LENGTH = struct.Struct("<Q")
_PLAIN = (bool, int, float, str, type(None))
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_REGISTERED: dict[str, type] = {}


class NotData(TypeError):
    """A value cannot be sent in a letter, or bytes hold none."""


def travels(cls: C) -> C:
    """A class decorator: values of this dataclass or enum may be sent. Its name is what the bytes call it."""
    assert dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum), f"{cls} is neither a dataclass nor an enum"
    assert _REGISTERED.setdefault(cls.__name__, cls) is cls, f"two classes are called {cls.__name__}"
    return cls


def can_travel(value: Any) -> bool:
    """Whether :func:`encode` takes the value."""
    try:
        encode(value)
    except NotData:
        return False
    return True


def encode(value: Any) -> bytes:
    """The value, encoded as bytes.

    Raises :class:`NotData` for what is no plain data. Tensors are taken as they are now.
    """
    contents: list[bytes] = []
    header = json.dumps(_packed(value, contents), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *contents])


def decode(payload: bytes) -> Any:
    """The value that :func:`encode` was given; tensors are on the host. Raises :class:`NotData` for other bytes."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        start = _LENGTH.size + length
        if start > len(payload):
            raise NotData(f"a header of {length} bytes in a letter of {len(payload)}")
        reader = _Reader(payload, start)
        value = reader.unpacked(json.loads(payload[_LENGTH.size : start]))
    except NotData:
        raise
    except Exception as error:
        raise NotData(f"these {len(payload)} bytes are no letter: {type(error).__name__}: {error}") from None
    if reader.left:
        raise NotData(f"{reader.left} bytes are left over behind a letter")
    return value


def _packed(value: Any, contents: list[bytes]) -> Any:
    """What JSON holds for the value: plain values and lists as they are, all others as ``{kind: what makes them up}``."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_packed(item, contents) for item in value]
    if isinstance(value, enum.Enum) and _is_registered(kind):
        return {"enum": [kind.__name__, value.name]}
    if dataclasses.is_dataclass(value) and _is_registered(kind):
        fields = [_packed(getattr(value, field.name), contents) for field in dataclasses.fields(value)]
        return {"object": [kind.__name__, fields]}
    for name, sequence in _SEQUENCES.items():
        if kind is sequence or (sequence is tuple and kind is torch.Size):
            return {name: [_packed(item, contents) for item in value]}
    if isinstance(value, dict) and kind.__module__ in ("builtins", "collections"):
        return {"dict": [[_packed(key, contents), _packed(item, contents)] for key, item in value.items()]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (bytes, bytearray):
        contents.append(bytes(value))
        return {"bytes": len(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        contents.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject and value.dtype.names is None:
        contents.append(value.tobytes())
        return {"array": [value.dtype.str, list(value.shape), isinstance(value, numpy.generic)]}
    shown = f"{value!r:.200}"
    raise NotData(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent in a letter, which holds plain data: {shown}"
    )


def _is_registered(kind: type) -> bool:
    return _REGISTERED.get(kind.__name__) is kind


class _Reader:
    """Takes values from a header, and their contents one by one from behind it."""

    def __init__(self, payload: bytes, start: int) -> None:
        self._payload, self._next = payload, start

    @property
    def left(self) -> int:
        """Bytes that nothing has taken yet."""
        return len(self._payload) - self._next

    def unpacked(self, packed: Any) -> Any:
        if isinstance(packed, _PLAIN):
            return packed
        if isinstance(packed, list):
            return [self.unpacked(item) for item in packed]
        ((kind, what),) = packed.items()
        return _UNPACK[kind](self, what)

    def take(self, nbytes: int) -> bytes:
        if not 0 <= nbytes <= self.left:
            raise NotData(f"{nbytes} bytes of content are announced, and {self.left} are there")
        self._next += nbytes
        return self._payload[self._next - nbytes : self._next]

    def registered(self, name: str, fields: list[Any]) -> Any:
        cls = _REGISTERED[name]
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**dict(zip(names, map(self.unpacked, fields), strict=True)))

    def tensor(self, dtype: str, shape: list[int]) -> torch.Tensor:
        kind = _dtype(dtype)
        content = self.take(math.prod(_sizes(shape)) * kind.itemsize)
        if not content:
            return torch.empty(shape, dtype=kind, device="cpu")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(kind).reshape(shape)

    def array(self, dtype: str, shape: list[int], scalar: bool) -> Any:
        kind = numpy.dtype(dtype)
        if kind.hasobject:
            raise NotData(f"an array of {dtype}")
        found = numpy.frombuffer(bytearray(self.take(math.prod(_sizes(shape)) * kind.itemsize)), kind).reshape(shape)
        return found[()] if scalar else found


def _sizes(shape: list[int]) -> list[int]:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise NotData(f"a shape of {shape}")
    return shape


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise NotData(f"a dtype of {name!r}")
    return found


def _enum(name: str, member: str) -> enum.Enum:
    cls = _REGISTERED[name]
    if not issubclass(cls, enum.Enum):
        raise NotData(f"{name} is no enum")
    return cls[member]


_UNPACK: dict[str, Callable[[_Reader, Any], Any]] = {
    **{
        name: lambda reader, items, make=make: make(map(reader.unpacked, items))  # type: ignore[misc]
        for name, make in _SEQUENCES.items()
    },
    "dict": lambda reader, items: {reader.unpacked(key): reader.unpacked(item) for key, item in items},
    "complex": lambda _, parts: complex(*parts),
    "bytes": lambda reader, nbytes: reader.take(nbytes),
    "dtype": lambda _, name: _dtype(name),
    "enum": lambda _, what: _enum(*what),
    "object": lambda reader, what: reader.registered(*what),
    "tensor": lambda reader, what: reader.tensor(*what),
    "array": lambda reader, what: reader.array(*what),
}
