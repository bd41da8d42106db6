"""Collectives by name are differentiable as Horovod's are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dear as hvd


def _leaf(rows: int = 4) -> torch.Tensor:
    return torch.full((rows, 3), float(hvd.rank() + 1), dtype=torch.float64, requires_grad=True)


def _weights(shape: torch.Size, rank: int) -> torch.Tensor:
    """What rank's loss multiplies the result with: its gradient."""
    return torch.arange(1, shape.numel() + 1, dtype=torch.float64).view(shape) * (rank + 1)


def _backward(result: torch.Tensor) -> None:
    (result * _weights(result.shape, hvd.rank())).sum().backward()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_allreduce(op: Any) -> None:
    leaf = _leaf()
    _backward(hvd.allreduce(leaf, op=op, prescale_factor=0.5, name="grad"))
    total = torch.stack([_weights(leaf.shape, rank) for rank in range(hvd.size())]).sum(0) * 0.5
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, total / hvd.size() if op is hvd.Average else total)


def test_grouped_allreduce_of_which_some_need_a_gradient() -> None:
    leaf, constant, count = _leaf(), _leaf().detach(), torch.tensor([1])
    means = hvd.grouped_allreduce([constant, leaf, count])
    _backward(means[1])
    total = torch.stack([_weights(leaf.shape, rank) for rank in range(hvd.size())]).mean(0)
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, total)
    assert not means[2].requires_grad


def test_compression_is_part_of_the_graph() -> None:
    leaf = _leaf()
    _backward(hvd.allreduce(leaf, compression=hvd.Compression.bf16))
    total = torch.stack([_weights(leaf.shape, rank) for rank in range(hvd.size())]).mean(0)
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, total, rtol=1e-2)


def test_allgather_of_uneven_rows() -> None:
    leaf = _leaf(hvd.rank() + 1)
    gathered = hvd.allgather(leaf)
    _backward(gathered)
    start = sum(range(1, hvd.rank() + 1))
    mean = torch.stack([_weights(gathered.shape, rank) for rank in range(hvd.size())]).mean(0)
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, mean[start : start + hvd.rank() + 1])
    scalar = torch.tensor(2.0, requires_grad=True)
    hvd.grouped_allgather([scalar])[0].sum().backward()
    assert scalar.grad is not None
    assert scalar.grad.item() == 1.0


def test_broadcast() -> None:
    leaf = _leaf()
    root = hvd.size() - 1
    _backward(hvd.broadcast(leaf, root))
    mean = torch.stack([_weights(leaf.shape, rank) for rank in range(hvd.size())]).mean(0)
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, mean if hvd.rank() == root else torch.zeros_like(mean))


@pytest.mark.parametrize("given", [False, True])
def test_alltoall_sends_gradients_back(given: bool) -> None:
    size, me = hvd.size(), hvd.rank()
    splits = torch.tensor([1 + (peer > me) if given else 1 for peer in range(size)])
    leaf = _leaf(int(splits.sum()))
    outcome = hvd.alltoall(leaf, splits if given else None)
    rows = outcome[0] if isinstance(outcome, tuple) else outcome
    (rows * (me + 1)).sum().backward()
    expected = torch.cat([torch.full((int(count),), peer + 1.0) for peer, count in enumerate(splits)])
    assert leaf.grad is not None
    assert torch.equal(leaf.grad[:, 0], expected.double())


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_reducescatter(op: Any) -> None:
    leaf = _leaf(5)
    shard = hvd.reducescatter(leaf, op=op, postscale_factor=3.0)
    _backward(shard)
    rows = [len(part) for part in torch.arange(5).tensor_split(hvd.size())]
    expected = torch.cat([_weights(torch.Size((count, 3)), rank) for rank, count in enumerate(rows)]) * 3
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, expected * hvd.size() if op is hvd.Sum else expected)


def test_the_gradient_of_a_gradient() -> None:
    leaf = _leaf()
    (first,) = torch.autograd.grad((hvd.allreduce(leaf, op=hvd.Sum) ** 2).sum(), leaf, create_graph=True)
    first.sum().backward()
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, torch.full_like(leaf.grad, 2.0 * hvd.size() ** 2))


def test_reductions_without_a_gradient_say_so() -> None:
    leaf = _leaf()
    with pytest.raises(NotImplementedError, match="gradient of MAX"):
        hvd.allreduce(leaf, op=hvd.Max).sum().backward()
