"""The public names of a module: what they are, and which arguments they take in which order with which defaults.

``python -m tests.compare_horovod.signature MODULE`` prints them as JSON; a process of its own imports Horovod.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from types import ModuleType
from typing import Any

__all__ = ["ABSENT", "follows", "names"]

ABSENT = "absent"
_CONSTANTS = ("Average", "Sum", "Min", "Max", "Product", "Adasum")


def names(module: Any) -> dict[str, str]:
    """``{"allreduce": "(tensor, average=None, …)", "Average": "constant", "Compression.fp16": "class", …}``."""
    found: dict[str, str] = {}
    for name in _public(module):
        value = getattr(module, name)
        found[name] = _written(value, module)
        if inspect.isclass(value) and _has_members(value):
            for member in _public(value):
                if callable(getattr(value, member)):
                    found[f"{name}.{member}"] = _written(inspect.getattr_static(value, member), module)
    return found


def _public(where: Any) -> list[str]:
    return sorted(name for name in dir(where) if not name.startswith("_"))


def _has_members(value: type) -> bool:
    """Not of classes whose members are torch's or Python's."""
    bases = {base.__name__ for base in value.__mro__}
    return not bases & {"Module", "BaseException", "Optimizer", "Enum"}


def _written(value: Any, module: Any) -> str:
    if isinstance(value, ModuleType):
        return "module"
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if inspect.isclass(value) and (issubclass(value, BaseException) or "compress" in vars(value)):
        return "class"
    if not callable(value):
        return "constant"
    try:
        signature = inspect.signature(value)
    except ValueError:
        return "callable"
    return "(" + ", ".join(_parameter(each, module) for each in signature.parameters.values()) + ")"


def _parameter(parameter: inspect.Parameter, module: Any) -> str:
    kinds = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**", parameter.KEYWORD_ONLY: "keyword "}
    prefix = next((text for kind, text in kinds.items() if kind is parameter.kind), "")
    default = parameter.default
    return (
        prefix
        + parameter.name
        + ("" if default is parameter.empty else f"={_default(parameter.name, default, module)}")
    )


def _default(name: str, value: Any, module: Any) -> str:
    """A default by the name it has in the module: reductions are numbers in one library and an enum in another."""
    if name == "op" and value is not None:
        return next((each for each in _CONSTANTS if getattr(module, each, None) == value), repr(value))
    if inspect.isclass(value) and value is getattr(getattr(module, "Compression", None), "none", None):
        return "Compression.none"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def follows(theirs: str, ours: str) -> bool:
    """Whether a call written for `theirs` means the same to `ours`.

    That is so when ours begins with all of their parameters, in order and with their defaults, and wants no further one.
    ``*args, **kwargs`` on their side says nothing.
    """
    if theirs == ours:
        return True
    if not (theirs.startswith("(") and ours.startswith("(")):
        return False
    wanted = [each for each in _parts(theirs) if not each.startswith("*")]
    offered = _parts(ours)
    rest = offered[len(wanted) :]
    if wanted != _parts(theirs) and not wanted:
        return True
    return offered[: len(wanted)] == wanted and all("=" in each or each.startswith("*") for each in rest)


def _parts(text: str) -> list[str]:
    return [each for each in text[1:-1].split(", ") if each]


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    found = names(module)
    found.update({f"elastic.{name}": text for name, text in names(module.elastic).items()})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
