"""What users of other libraries may give to dear's optimizer there."""

from __future__ import annotations

from typing import Any

import pytest

from dear.integrations.options import STRATEGIES, checked


@pytest.mark.parametrize(
    ("options", "averages"),
    [
        ({}, False),
        ({"threshold_mb": 4}, False),
        *(({"strategy": strategy}, False) for strategy in STRATEGIES),
        ({"strategy": "co2", "outer_frequency": 4}, True),
    ],
)
def test_options_are_those_of_the_strategy(options: dict[str, Any], averages: bool) -> None:
    found = checked(options, averages=averages)
    assert found == options
    assert found is not options
    assert checked(None) == {}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strategy": "co2"}, ValueError, "trainer, strategy 'co2': ranks have different parameters"),
        ({"strategy": "ddp"}, ValueError, r"should be one of .* and is 'ddp'"),
        ({"treshold_mb": 4}, TypeError, "trainer has no 'treshold_mb' with strategy 'dear'; is 'threshold_mb' meant"),
        ({"strategy": "wfbp", "zzz": 4}, TypeError, "with strategy 'wfbp'; there are .*compression"),
        ({"optimizer": None}, ValueError, "'optimizer' is not for here, the library makes it"),
        ({"named_parameters": []}, ValueError, "the library's model is given"),
        ({"backward_passes_per_step": 2}, ValueError, "gradient accumulation says it"),
        ({"process_set": None}, ValueError, "the library trains on all processes"),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        checked(options, "trainer")
