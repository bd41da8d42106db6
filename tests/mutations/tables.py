"""All tables, by name."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mutations import (
    backend,
    calls,
    co2,
    core,
    device,
    divided,
    fsdp,
    health,
    launch,
    oss,
    plan,
    state,
    transport,
)
from tests.mutations.mutation import Mutation

__all__ = ["TABLES"]

TABLES: dict[str, Sequence[Mutation]] = {
    "backend": backend.MUTATIONS,
    "calls": calls.MUTATIONS,
    "co2": co2.MUTATIONS,
    "core": core.MUTATIONS,
    "device": device.MUTATIONS,
    "divided": divided.MUTATIONS,
    "fsdp": fsdp.MUTATIONS,
    "health": health.MUTATIONS,
    "launch": launch.MUTATIONS,
    "oss": oss.MUTATIONS,
    "plan": plan.MUTATIONS,
    "state": state.MUTATIONS,
    "transport": transport.MUTATIONS,
}
