"""What ranks begin with: rank 0's buffers of any kind, and its optimizer's state, but for what cannot be sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear
from overlap.job.session import current
from overlap.transport.broadcast import broadcast_structure, broadcast_tensors
from overlap.transport.objects import NotSent, allgather_object, broadcast_object
from tests.spmd.models import double_model
from tests.spmd.strategies import WRAP
from tests.spmd.training import local_loss, same_everywhere


def _complex(number: int) -> torch.Tensor:
    return torch.tensor([1 + 1j * number, 2 - 3j], device="cpu").conj()


def _grid(number: int) -> torch.Tensor:
    return torch.eye(4, device="cpu") * number + (number > 1)  # others have more elements than rank 0


# Made from a number that is another one on every rank.
KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "sparse": lambda number: _grid(number).to_sparse(),
    "compressed": lambda number: _grid(number).to_sparse_csr(),
    "in blocks": lambda number: _grid(number).to_sparse_bsr((2, 2)),
    "quantized": lambda number: torch.quantize_per_tensor(_grid(number), 0.1 * number, number, torch.qint8),
    "conjugated": _complex,
    "negated": lambda number: _complex(number).imag,
    "strided": lambda number: torch.ones(3, 2, device="cpu").t() * number,
}


def _values(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.dequantize() if tensor.is_quantized else tensor
    return plain.detach().to_dense() if plain.layout is not torch.strided else plain.detach().clone()


@pytest.mark.filterwarnings("ignore")  # torch calls compressed tensors beta, and quantized ones deprecated
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_kind_become_the_roots(kind: str) -> None:
    """Where they are, with others before and after them; and as new ones in a structure."""
    make, root = KINDS[kind], dear.size() - 1
    plain = [torch.full((2,), float(dear.rank()), device="cpu") for _ in range(2)]
    mine, wanted = make(dear.rank() + 1), make(root + 1)
    broadcast_tensors(current().comm, [plain[0], mine, plain[1]], root)
    received = broadcast_structure(current().comm, {"a": [make(dear.rank() + 1), 3]}, root)["a"][0]
    for tensor in (mine, received):
        assert torch.equal(_values(tensor), _values(wanted))
        assert (tensor.layout, tensor.dtype) == (wanted.layout, wanted.dtype)
    assert all(one.tolist() == [root] * 2 for one in plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["dear", "oss", "wfbp", "mgwfbp", "bytescheduler"])
def test_models_with_buffers_of_any_kind_are_wrapped(strategy: str) -> None:
    model = double_model("Mlp")
    for name, make in KINDS.items():
        model.register_buffer(name, make(dear.rank() + 1))
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model)
    for name, make in KINDS.items():
        assert torch.equal(_values(model.get_buffer(name)), _values(make(1))), name
    local_loss(model).backward()
    optimizer.step()


def test_parameters_in_a_structure_stay_parameters() -> None:
    given = {
        "parameter": torch.nn.Parameter(torch.full((2,), float(dear.rank()))),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(2).requires_grad_(),
        "plain": torch.ones(2),
    }
    received = broadcast_structure(current().comm, given, 0)
    for name, value in given.items():
        assert type(received[name]) is type(value)
        assert received[name].requires_grad is value.requires_grad
        assert received[name].is_leaf
    assert received["parameter"].tolist() == [0.0, 0.0]
    (received["parameter"] * 2).sum().backward()


SENDING: dict[str, Callable[[Any], Any]] = {
    "an object": lambda bad: broadcast_object(current().comm, bad, dear.size() - 1),
    "everybody's objects": lambda bad: allgather_object(current().comm, bad),
    "a structure": lambda bad: broadcast_structure(current().comm, [torch.ones(2), bad], dear.size() - 1),
}


@pytest.mark.parametrize("what", SENDING)
def test_what_one_rank_cannot_send_fails_on_all(what: str) -> None:
    if dear.size() == 1:
        pytest.skip("one rank sends nothing")
    last = dear.size() - 1
    bad = (lambda: None) if dear.rank() == last else None
    with pytest.raises(NotSent, match=rf"rank {last} could not send an object: .*<lambda>"):
        SENDING[what](bad)
    assert allgather_object(current().comm, dear.rank()) == list(range(dear.size()))


def test_a_tensor_that_the_root_cannot_read_fails_on_all() -> None:
    if dear.size() == 1:
        pytest.skip("one rank sends nothing")
    tensors = [torch.ones(2), torch.ones(2, device="meta" if dear.rank() == 0 else "cpu")]
    with pytest.raises(NotSent, match="rank 0 could not send an object: NotImplementedError"):
        broadcast_tensors(current().comm, tensors, 0)
    assert allgather_object(current().comm, dear.rank()) == list(range(dear.size()))


@pytest.mark.parametrize("strategy", ["dear", "oss", "wfbp", "bytescheduler"])
def test_what_cannot_be_pickled_stays_with_its_rank(strategy: str) -> None:
    """A function in a parameter group, and beside a tensor in the state; all else is rank 0's."""
    model, rank = double_model("Mlp"), dear.rank()
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[:1], "chosen_by": lambda: rank, "lr": 0.1 * (rank + 1)},
        {"params": parameters[1:], "weight_decay": 0.01 * (rank + 1)},
    ]
    inner = torch.optim.SGD(groups, 0.2, momentum=0.9)
    first = parameters[0]
    inner.state[first] = {
        "momentum_buffer": torch.full_like(first, float(rank)),
        "made_by": [lambda: rank, torch.ones(rank)],
    }
    optimizer = WRAP[strategy](inner, model)
    assert inner.param_groups[0]["chosen_by"]() == rank
    assert inner.state[first]["made_by"][0]() == rank
    assert not inner.state[first]["momentum_buffer"].any()
    assert inner.param_groups[0]["lr"] == 0.1
    assert inner.param_groups[1]["weight_decay"] == 0.01
    for step in range(3):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
    same_everywhere(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


@pytest.mark.parametrize("strategy", ["dear", "oss", "wfbp", "bytescheduler"])
def test_ranks_out_of_data_keep_what_cannot_be_pickled(strategy: str) -> None:
    """They take over the others' learning rate, and not the function beside it."""
    model, rank = double_model("Mlp"), dear.rank()
    group = {"params": list(model.parameters()), "chosen_by": lambda: rank}
    optimizer = WRAP[strategy](torch.optim.SGD([group], 0.1), model)
    for step in range(2 + rank):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
    assert dear.join() == dear.size() - 1
    assert optimizer.param_groups[0]["chosen_by"]() == rank
    assert optimizer.param_groups[0]["lr"] == 0.1 / (1 + dear.size())
    same_everywhere(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
