"""Names in state dicts without those of wrappers. Pure."""

from __future__ import annotations

from typing import Any

__all__ = ["LEVEL", "Told", "cleaned", "move_down", "move_up"]

#: Under this name a wrapper has its module.
LEVEL = "_fsdp_wrapped_module"


def cleaned(name: str) -> str:
    """`name` without the levels of wrappers."""
    return ".".join(part for part in name.split(".") if part != LEVEL)


def move_up(found: Any, prefix: str) -> None:
    """Rename what a wrapper at `prefix` has in the state dict `found`, and in its metadata, to the names without it."""
    inner = f"{prefix}{LEVEL}."
    for name in [name for name in found if name.startswith(inner)]:
        found[prefix + name[len(inner) :]] = found.pop(name)
    told = getattr(found, "_metadata", None)
    if told is not None:
        for name in [name for name in told if f"{name}.".startswith(inner)]:
            told[f"{prefix}{name[len(inner) :]}" if name != inner[:-1] else prefix[:-1]] = told.pop(name)


def move_down(found: Any, prefix: str) -> None:
    """The reverse of :func:`move_up`, for a state dict that is loaded."""
    inner = f"{prefix}{LEVEL}."
    for name in [name for name in found if name.startswith(prefix)]:
        found[inner + name[len(prefix) :]] = found.pop(name)


class Told(dict[str, Any]):
    """Metadata of a state dict, which has no levels of wrappers, found with them as well."""

    def get(self, name: str, default: Any = None) -> Any:
        """What is under the `name`, cleaned."""
        return super().get(cleaned(name), default)
