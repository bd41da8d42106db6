"""What reports say of operations whose labels are short."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overlap.health.explained import Explained, in_words
from overlap.health.watchdog import Watchdog


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (["0.weight"], "0.weight, step 3"),
        (["0.weight", "0.bias"], "0.weight, 0.bias, step 3"),
        (["0.weight", "0.bias", "1.weight"], "0.weight, 0.bias and 1 more, step 3"),
    ],
)
def test_a_bucket_in_words(parameters: list[str], said: str) -> None:
    assert in_words(parameters, 3) == said


@pytest.mark.parametrize(("channel", "said"), [("a", "sum 'b0' [b0: 0.weight, step 3]"), ("b", "sum 'b0'")])
def test_a_report_says_what_a_label_means_on_its_channel(channel: str, said: str) -> None:
    """Every optimizer has a first bucket."""
    work: Any = SimpleNamespace(seconds=1.0, label="b0", op="sum", describe=lambda: "sum 'b0'", done=lambda: True)

    def meaning(channel: str, label: str) -> str:
        return {("a", "b0"): "0.weight, step 3"}.get((channel, label), "")

    explained = Explained(work, channel, meaning)
    assert (explained.describe(), explained.seconds, explained.done()) == (said, 1.0, True)
    comm: Any = SimpleNamespace(rank=0, size=1, name=channel, pending=lambda: [work], lines=dict)
    watchdog = Watchdog(comm, SimpleNamespace(), "here", warn_after=0.0, abort_after=0.0)  # type: ignore[arg-type]
    watchdog.meaning = meaning
    assert f"waiting in {said}" in watchdog._standing().text
