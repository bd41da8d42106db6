"""Tells all ranks, in a call that they make anyhow, that steps of one have become longer or shorter, or take more memory.

It travels in the tally of the call that closes a round (`overlap.core.tally`), so it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from overlap.core.feature import Feature

__all__ = ["Replanning"]


class Replanning(Feature):
    """A rank sets `wanted`; all ranks find `heard` set in the same step. Other news may set it as well."""

    def __init__(self) -> None:
        self.wanted = self.heard = False

    def forget(self) -> None:
        """All have heard, or nobody listens any more: else ranks would go on to agree on it in every step."""
        self.wanted = self.heard = False

    def news(self) -> bool:
        return self.wanted

    def closed(self, news: bool, leader: Callable[[], int], factor: Callable[[], float]) -> None:
        self.heard = self.heard or news
