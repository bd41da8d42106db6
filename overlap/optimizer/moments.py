"""Checks whether something may be done between backward and ``step()``.

Each raises on one rank, and is said to the others in a tally.
"""

from __future__ import annotations

from overlap.core.engine import Engine

__all__ = ["may_add"]


def may_add(engine: Engine) -> None:
    """Check that parameters may be added now; raises ``RuntimeError`` where averages of this round are made already."""
    engine.policy.refuse("add_param_group()")
    if engine.closing.closed:
        raise RuntimeError(
            "add_param_group() was called when gradients were averaged already, and those of the new parameters are not: "
            "call it before clipping or synchronize(), or after step()"
        )
