"""What a bare machine needs before anything of ours can be imported; nothing is fetched from a network."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

__all__ = ["commands", "whole_library"]


def commands(
    python: str, root: Path, wheels: Sequence[Path], has_comm_core: bool, missing: Sequence[str]
) -> list[tuple[str, ...]]:
    """Commands that install carried `wheels` and build comm_core where it cannot be imported (pure).

    Raises ``ValueError`` where comm_core has to be built and packages that this takes are `missing`.
    """
    install = (python, "-m", "pip", "install", "--no-index", "--no-deps")
    made: list[tuple[str, ...]] = []
    if wheels:
        made.append((*install, *map(str, sorted(wheels))))
    if not has_comm_core:
        carried = {wheel.name.split("-")[0].lower().replace("_", "-") for wheel in wheels}
        lacking = [name for name in missing if name not in carried]
        if lacking:
            raise ValueError(
                f"comm_core is not built here, and building it takes {', '.join(lacking)}; carry the wheels and name their "
                "folder with --wheels"
            )
        made.append((*install, "--no-build-isolation", "--editable", str(root)))
    return made


def whole_library(given: Path, folder: Path) -> Path:
    """A libnccl in one piece: `given` itself, or, where it is a folder, its files put together in `folder` by name.

    Raises ``ValueError`` for what is neither.
    """
    if given.is_file():
        return given.resolve()
    parts = sorted(part for part in given.iterdir() if part.is_file()) if given.is_dir() else []
    if not parts:
        raise ValueError(f"--nccl should be a library, or a folder with its parts, and is {given}")
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder.resolve() / "libnccl.so.2"
    with whole.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out)
    return whole
