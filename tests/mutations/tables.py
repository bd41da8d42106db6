"""All tables, by name."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mutations import co2, core, health, launch, oss, plan, transport
from tests.mutations.mutation import Mutation

__all__ = ["TABLES"]

TABLES: dict[str, Sequence[Mutation]] = {
    "co2": co2.MUTATIONS,
    "core": core.MUTATIONS,
    "health": health.MUTATIONS,
    "launch": launch.MUTATIONS,
    "oss": oss.MUTATIONS,
    "plan": plan.MUTATIONS,
    "transport": transport.MUTATIONS,
}
