"""A checkpoint that says what it belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Other values of these would train something else than what the checkpoint began.
SAME = ("data", "seed", "batch_size", "lr")


class CheckpointError(ValueError):
    """The file is missing, is none of ours, or belongs to a run with other settings."""


def load(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The state that was saved, after a look at whether it continues a run with these `settings`."""
    if not path.is_file():
        raise CheckpointError(f"--resume: there is no checkpoint {path}")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        made_with = state["settings"]
    except Exception as error:  # a file of any kind; torch raises several types for it
        raise CheckpointError(f"--resume: {path} is no checkpoint of this example ({error})") from error
    for name in SAME:
        if made_with[name] != settings[name]:
            raise CheckpointError(
                f"--resume: {path} was made with {name} {made_with[name]!r}, and this run has {settings[name]!r}"
            )
    return state
