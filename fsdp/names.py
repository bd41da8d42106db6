"""Names in state dicts without those of wrappers, and names of fairscale's that are not here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LEVEL", "NOT_HERE", "Told", "cleaned", "move_down", "move_up"]

#: Under this name a wrapper has its module.
LEVEL = "_fsdp_wrapped_module"

#: What a script may look for in `fsdp` that fairscale has: the whole message.
NOT_HERE: Mapping[str, str] = {
    "auto_wrap_bn": "fsdp has no auto_wrap_bn: a batch normalisation needs no wrapper of its own, as its parameters may be "
    "gathered with others; dear.SyncBatchNorm.convert_sync_batchnorm(model) makes it use all ranks' statistics",
    "TrainingState": "fsdp has no TrainingState: what a module does at the moment is nothing that a script has to set",
    "ConfigAutoWrap": "fsdp has no ConfigAutoWrap: enable_wrap() is the context, and auto_wrap() wraps by a policy",
    "no_pre_load_state_dict_hook": "fsdp has no no_pre_load_state_dict_hook: state dicts have the names of the model "
    "without wrappers, whether a wrapper or a module inside loads them",
    "OffloadConfig": "fsdp has no OffloadConfig: shares are in the CPU's memory, and none are on disk",
    "ShardedGradScaler": "fsdp has no ShardedGradScaler: torch.amp.GradScaler looks at all shares; oss has fairscale's",
    "checkpoint_wrapper": "fsdp has no checkpoint_wrapper: it is a name of oss, and works on models of fsdp",
}


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
