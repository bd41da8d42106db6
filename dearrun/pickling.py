"""Pickles functions with the source lines of where they were defined, so that tracebacks show them."""

from __future__ import annotations

import io
import linecache
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle

__all__ = ["dumps", "lines_of", "remember"]


def dumps(value: Any) -> bytes:
    """`value`, pickled by cloudpickle. Raises what cloudpickle does where that cannot be done."""
    into = io.BytesIO()
    _Pickler(into).dump(value)
    return into.getvalue()


def _reduced(code: types.CodeType) -> tuple[Callable[..., types.CodeType], tuple[Any, ...]]:
    """cloudpickle calls every file "<dynamic-code>"."""
    _, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _made, (arguments, code.co_filename)


def _made(arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    return types.CodeType(*arguments).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _reduced}, cloudpickle.Pickler.dispatch_table)


def lines_of(function: Any) -> tuple[str, list[str]]:
    """The name of the file in which `function` was defined, and its lines as they are known here."""
    code = getattr(function, "__code__", None)
    return (code.co_filename, linecache.getlines(code.co_filename)) if code is not None else ("", [])


def remember(filename: str, lines: list[str]) -> None:
    """Make tracebacks show these `lines` of a file which may not be here, such as a cell of a notebook."""
    if lines:
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
