"""Modules are found by the parameters they hold."""

from __future__ import annotations

import copy
import gc
import weakref

import torch

from overlap.core.gates.holders import holders


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), torch.nn.Linear(2, 1))


def test_owners_and_all_around_them_are_found_and_no_others() -> None:
    model = _model()
    others = [copy.deepcopy(model), torch.nn.Linear(2, 2)]
    found = holders(model[0].parameters())
    assert set(found) == {model, model[0], model[0][0]}
    assert len(found) == 3
    assert not set(found) & {module for other in others for module in other.modules()}


def test_a_shared_parameter_has_several_owners() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    assert set(holders([first.weight])) == {first, second}


def test_what_the_garbage_collector_leaves_alone_is_found_and_nothing_new_is_left_alone_with_it() -> None:
    model = torch.nn.Linear(2, 2)
    gc.freeze()
    try:
        made = torch.nn.Linear(2, 2)
        made.itself = [made]
        later = weakref.ref(made)
        assert holders([model.weight]) == [model]
        del made
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
