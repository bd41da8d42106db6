"""Unpickles objects that other ranks of the job have pickled."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

__all__ = ["Unpickler", "loads"]


class Unpickler(pickle.Unpickler):
    """Python's unpickler without a warning of torch before 2.6 for each tensor."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch.storage", "_load_from_bytes"):
            return _storage_from_bytes
        return super().find_class(module_name, global_name)


def _storage_from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def loads(content: bytes) -> Any:
    """The object that was pickled as `content`."""
    return Unpickler(io.BytesIO(content)).load()
