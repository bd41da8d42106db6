"""What the user has to correct before a job can start."""

from __future__ import annotations

__all__ = ["LaunchError"]


class LaunchError(Exception):
    """Shown as one line, with the remedy in it."""
