"""All tables, by name."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mutations import core, health, launch
from tests.mutations.mutation import Mutation

__all__ = ["TABLES"]

TABLES: dict[str, Sequence[Mutation]] = {
    "core": core.MUTATIONS,
    "health": health.MUTATIONS,
    "launch": launch.MUTATIONS,
}
