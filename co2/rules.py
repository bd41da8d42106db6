"""The outer rules by name, with the options that users give them (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from co2.equations import (
    WORDS,
    Acco,
    Co2Rule,
    DiLoCo,
    Eager,
    LocalSgd,
    OuterRule,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)

__all__ = ["RULES", "outer_rule", "refuse_comparisons"]

#: By the name that users give.
RULES: Mapping[str, type[OuterRule]] = {
    rule.name: rule for rule in (Co2Rule, LocalSgd, SlowMo, DiLoCo, Eager, StreamingDiLoCo, SparseLoCo, Acco)
}


def outer_rule(name: str, given: Mapping[str, Any]) -> OuterRule:
    """The rule that users call `name`, with their options: those that are ``"auto"`` are as the rule has them.

    Raises ``ValueError`` for names and values that are none, and for an option that the rule does not know.
    """
    if name not in RULES:
        raise ValueError(f"outer should be one of {', '.join(map(repr, RULES))} and is {name!r}")
    rule = RULES[name]
    known = {field.name for field in fields(rule)}
    chosen = {word: value for word, value in given.items() if not (isinstance(value, str) and value == "auto")}
    foreign = [f"{word}={value!r}" for word, value in chosen.items() if WORDS[word] not in known]
    if foreign:
        takes = [word for word, field in WORDS.items() if field in known]
        raise ValueError(
            f"{', '.join(foreign)}: outer={name!r} takes {' and '.join(takes) or 'no options of its own'}; leave it out"
        )
    return rule(**{WORDS[word]: value for word, value in chosen.items()})


def refuse_comparisons(check_every: int | None) -> None:
    """Raise ``ValueError`` for ``check_every``: ranks train apart, so their parameters differ between averages."""
    if check_every:
        raise ValueError(
            f"check_every={check_every} compares ranks in step(), and with co2 replicas differ between averages: call "
            "average_parameters(), and check_replicas(model) after it"
        )
