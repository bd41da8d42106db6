"""What the model's own ``state_dict()`` hands out, and what is saved of it."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from tests.spmd.strategies import PACKAGES
from tests.spmd.training import local_loss, same_everywhere, trained


@pytest.mark.parametrize("strategy", PACKAGES)
def test_state_dict_is_the_parameters_own_memory(strategy: str) -> None:
    """What is written through it counts, as in torch; what is kept of it before a step is what it was only in a copy."""
    model, optimizer = trained(strategy)
    entry, copied = model.state_dict()["head.weight"], copy.deepcopy(model.state_dict())
    with torch.no_grad():
        entry.fill_(0.25)
    assert bool((model.head.weight == 0.25).all())
    assert not bool((copied["head.weight"] == 0.25).any())
    optimizer.zero_grad()
    local_loss(model).backward()
    optimizer.step()
    assert 0 < float((model.head.weight - 0.25).abs().max()) < 0.2
    same_everywhere(model.head.weight.detach())


def test_tensors_of_a_bucket_are_saved_without_the_bucket() -> None:
    model, optimizer = trained(steps=1)
    local_loss(model).backward()
    head = model.head
    size = head.bias.numel() * head.bias.element_size()
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    for tensor in (model.state_dict()["head.bias"], head.bias, head.bias.grad):
        assert tensor is not None
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        assert buffer.tell() < size + 2000 < whole
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True), tensor)
    optimizer.step()
