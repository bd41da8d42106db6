"""Objects that ``torch.compile`` does not look into, with guards that their owner defines.

Their names in torch are private.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["AVAILABLE", "Opaque", "register"]

# Where the base class is, its name, that of the function which registers a class, and of the kind of objects.
_NAMES = (
    ("torch._custom_class_base", "CustomClassBase", "register_custom_class", "symbolic"),
    ("torch._opaque_base", "OpaqueBase", "register_opaque_type", "reference"),  # before torch 2.15
)


def _find() -> tuple[type, Callable[..., None], Any, str] | None:
    if torch.__version__ < "2.13":
        return None  # not there, or they do less
    for module, base, function, kind in _NAMES:
        with contextlib.suppress(ImportError, AttributeError):
            objects = importlib.import_module("torch._library.opaque_object")
            found = getattr(importlib.import_module(module), base)
            return found, getattr(objects, function), objects.MemberType.USE_REAL, kind
    return None  # torch promises nobody that they stay


_found = _find()
AVAILABLE = _found is not None

if TYPE_CHECKING:
    Opaque = object
else:
    Opaque = object if _found is None else _found[0]


def register(cls: type, guard: Callable[[Any], list[object]], real: str) -> None:
    """Let compiled code that met an object of `cls` call ``guard(object)`` before each call; tracing calls `real`."""
    assert _found is not None
    _, function, use_real, kind = _found
    function(cls, typ=kind, guard_fn=guard, members={real: use_real})
