"""What one rank alone knows decides nothing: the scripts of `tests.local_decisions`, each with its strategies."""

from __future__ import annotations

import pytest

import dear
from tests.local_decisions import SCENARIOS

ENDS_ITS_JOB = "a_cause_behind_shutdown"  # tests/test_local_decisions.py runs it
CASES = [(name, each) for name, (_, strategies) in SCENARIOS.items() for each in strategies if name != ENDS_ITS_JOB]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_two_ranks(name: str, strategy: str) -> None:
    dear.init()
    if dear.size() != 2:
        pytest.skip("scripts of two ranks")
    run, _ = SCENARIOS[name]
    run(strategy)
