"""When it is said that rounds are not hidden behind their steps."""

from __future__ import annotations

import logging

import pytest

from co2.pace import Lateness


@pytest.mark.parametrize("option", ["outer_frequency", "localsgd_frequency"])
def test_what_is_worth_saying_is_said_once(option: str, caplog: pytest.LogCaptureFixture) -> None:
    lateness = Lateness(rank=3, frequency=12, option=option)
    with caplog.at_level(logging.WARNING, logger="dear"):
        lateness.note(0.05, 1.0)
        assert not caplog.records, "a twentieth of the round's time"
        lateness.note(0.2, 1.0)
        lateness.note(0.9, 1.0)
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("co2: rank 3 waited 0.2 s for the average of a round whose 12 step(s) took 1 s")
    assert f"a larger {option} hides it" in message
