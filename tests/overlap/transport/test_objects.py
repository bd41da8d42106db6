"""What ranks say of themselves is compared line by line."""

from __future__ import annotations

import pytest

from overlap.transport.objects import SignatureMismatch, compare


def test_all_ranks_that_say_the_same_may_go_on() -> None:
    compare("models", [["a", "b"], ["a", "b"], ("a", "b")])
    compare("models", [[], []])


@pytest.mark.parametrize(
    ("signatures", "told"),
    [
        ([["a", "b"], ["a", "b"], ["a", "c"]], "entry 1 is «b» on rank 0 and «c» on rank 2"),
        ([["a", "b"], ["a"]], "entry 1 is «b» on rank 0 and «nothing more» on rank 1"),
        ([["a"], ["a", "b"]], "entry 1 is «nothing more» on rank 0 and «b» on rank 1"),
        ([[], ["a"]], "entry 0 is «nothing more» on rank 0 and «a» on rank 1"),
    ],
)
def test_the_first_difference_is_named_with_both_values(signatures: list[list[str]], told: str) -> None:
    with pytest.raises(SignatureMismatch, match=f"^models differ between ranks: {told}$"):
        compare("models", signatures)
