"""What is read out of a checkpoint's metadata, and which hyper-parameters a group gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.state.saved import Entry, by_parameter, first_few, groups_for, merged_groups, nest


def test_paths_become_dictionaries_and_lists() -> None:
    items = [(("a", 1, "x"), 1), (("a", 0, "x"), 0), (("b",), {}), (("c", "1"), 2)]
    assert nest(items) == {"a": [{"x": 0}, {"x": 1}], "b": {}, "c": {"1": 2}}


@pytest.mark.parametrize("flat", [False, True])
def test_state_belongs_to_the_longest_name(flat: bool) -> None:
    """A module may be named as the state of another is."""
    names = ["a", "a.b", "a.b.c"]
    entries = []
    for name in names:
        path: Any = (f"state.{name}.step",) if flat else ("state", name, "step")
        entries.append(Entry(f"optim.state.{name}.step", ("optim", *path)))
    entries.append(Entry("optim.param_groups.0.lr", ("optim", "param_groups", 0, "lr")))
    entries.append(Entry("optim.state.other.step", ("optim", "state", "other", "step")))
    found = by_parameter(entries, "state", names)
    assert {name: [path for path, _ in inside] for name, inside in found.items()} == {
        name: [("step",)] for name in names
    }
    assert [inside[0][1].key for inside in found.values()] == [f"optim.state.{name}.step" for name in names]


def test_groups_follow_their_parameters() -> None:
    saved = [{"params": ["b"], "lr": 2}, {"params": ["a", "c"], "lr": 1}]
    assert groups_for([["a"], ["b"], ["c"], []], saved) == [{"lr": 1}, {"lr": 2}, {"lr": 1}, {}]
    alone = [{"params": [name], "lr": torch.tensor(1.0)} for name in "abc"]
    assert groups_for([["a", "b"]], alone) == [{"lr": torch.tensor(1.0)}]


def test_groups_of_ranks_with_other_parameters_are_one() -> None:
    first = [{"params": ["a"], "lr": 1}, {"params": ["b"], "lr": 2}]
    assert merged_groups([first, first]) == first
    assert merged_groups([first, [{"params": ["c"], "lr": 2}]]) == [first[0], {"params": ["b", "c"], "lr": 2}]
    alike = [{"params": ["a"], "lr": 1}, {"params": ["b"], "lr": 1}]
    others = [{"params": ["c"], "lr": 1}, {"params": ["d"], "lr": 1}, {"params": ["e"], "lr": torch.tensor(1.0)}]
    assert [group["params"] for group in merged_groups([alike, others])] == [["a", "c"], ["b", "d"], ["e"]]
    named = [{"params": ["a"], "param_names": ["x"]}], [{"params": ["b"], "param_names": ["x"]}]
    assert merged_groups(named) == [{"params": ["a", "b"], "param_names": ["a", "b"]}]
    assert merged_groups([[], []]) == []


def test_groups_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="no hyper-parameters of 'x'"):
        groups_for([["a", "x"]], [{"params": ["a"]}])
    with pytest.raises(ValueError, match="'a' and 'b' are in one parameter group"):
        groups_for([["a", "b"]], [{"params": ["a"], "lr": 1}, {"params": ["b"], "lr": 2}])


def test_a_few_names_are_shown() -> None:
    assert first_few(["a", "b"]) == "'a', 'b'"
    assert first_few(list("abcdefg")) == "'a', 'b', 'c', 'd' and 3 more"
