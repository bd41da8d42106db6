"""The logger of all packages, which is set up only where the environment asks for it."""

from __future__ import annotations

import logging

from overlap.job.settings import Settings

__all__ = ["configure"]

log = logging.getLogger("dear")


def configure(settings: Settings, rank: int) -> None:
    """Set the log level that the environment asks for, and warn of variables that have no effect. Local."""
    if settings.log_level is not None:
        log.setLevel(settings.log_level)
        if not log.hasHandlers():  # a script that configures logging keeps its own form
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter(f"[%(asctime)s, rank {rank}, %(levelname)s] %(message)s"))
            log.addHandler(handler)
    if rank > 0:
        return
    if settings.ignored:
        log.warning(
            "environment variables without a counterpart here, so without effect: %s", ", ".join(settings.ignored)
        )
    for name, meant in settings.misspelt:
        log.warning("the environment variable %s has no effect: is %s meant?", name, meant)
