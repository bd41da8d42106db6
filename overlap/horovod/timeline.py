"""Timelines, as scripts use them: start, stop, and draw one. Every strategy's package offers these functions."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath

from overlap.job.session import current
from overlap.trace import picture as timeline_picture
from overlap.trace import timeline

__all__ = ["draw_timeline", "start_timeline", "stop_timeline"]


def start_timeline(file_path: str | PathLike[str], mark_cycles: bool = False, *, max_mb: float | None = None) -> None:
    """Record from now on what is communicated and computed when, as a Chrome trace. Local; after ``init()``.

    Args:
        file_path: the file to write, replaced if it exists. With ``{rank}`` in it every rank that calls this writes one,
            else rank 0 alone does. It is complete JSON at any moment, also when the process is killed. Look at it with
            https://ui.perfetto.dev, chrome://tracing or :func:`draw_timeline`.
        mark_cycles: mark where optimizer steps begin.
        max_mb: the file never gets larger than this many MB (2^20 bytes); when it is full the recording ends with a
            warning. Default: ``DEAR_TIMELINE_MAX_MB``, else 64.

    Raises ``RuntimeError`` while a recording goes on, ``OSError`` where the file cannot be written.
    """
    limit = current().settings.timeline_max_mb if max_mb is None else max_mb
    current().start_timeline(fspath(file_path), mark_cycles, limit)


def stop_timeline() -> None:
    """End the recording and complete its file; operations in flight are marked. Local; without a recording a no-op."""
    timeline.stop()


def draw_timeline(
    files: str | PathLike[str] | Sequence[str | PathLike[str]],
    picture: str | PathLike[str],
    steps: int = 2,
    skip: int = 1,
) -> None:
    """Draw steps of recorded timelines as a PNG, all ranks' below each other. Local; needs matplotlib.

    Args:
        files: one file, or those of several ranks.
        picture: where to write the PNG.
        steps: how many optimizer steps to show.
        skip: how many to leave out first; the first one only learns the model.

    Raises ``ValueError`` where the files hold fewer than ``skip + 1`` steps.
    """
    several = [files] if isinstance(files, str | PathLike) else files
    timeline_picture.draw([fspath(file) for file in several], fspath(picture), steps, skip)
