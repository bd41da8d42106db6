"""What to do where comm_core is found without its native part. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["elsewhere", "explanation"]


def elsewhere(folder: Path, path: Sequence[str]) -> Path | None:
    """Another comm_core on `path` (``sys.path``) than the one in `folder`, with a native part for some Python."""
    places = (Path(entry).resolve() / "comm_core" for entry in path)
    return next((place for place in places if place != folder and any(place.glob("_C.*.so"))), None)


def explanation(folder: Path, python: str, path: Sequence[str]) -> str:
    """The message for a comm_core in `folder` that has nothing for this version of Python (``"3.11"``)."""
    what = f"comm_core in {folder} has no native part for Python {python}"
    if not (folder / "bindings").is_dir():
        return f"{what}: it was installed by another Python; install dear-pytorch with this one"
    remedy = "'bash comm_core/compile.sh' builds it into the active environment, 'make setup' into .venv"
    other = elsewhere(folder, path)
    if other is not None:
        remedy += f"; or start Python in another directory, to use the one in {other}"
    return f"{what}: this is a checkout in which it is not built. {remedy}"
