"""The names that a sweep's table may have."""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["refuse_strangers"]


def refuse_strangers(given: Iterable[str], known: Collection[str], where: str) -> None:
    """Raise ``ValueError`` for names that `where`, a part of the table, does not know."""
    strangers = sorted(set(given) - set(known))
    if strangers:
        raise ValueError(f"{where} does not know {', '.join(strangers)}; it knows {', '.join(sorted(known))}")
