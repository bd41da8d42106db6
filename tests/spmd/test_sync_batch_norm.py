"""Batch normalisation across ranks equals batch normalisation in one process on the concatenated batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dear
from overlap.horovod.sync_batch_norm import BatchMismatch

FEATURES = 3
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def _counts(uneven: bool) -> list[int]:
    """Samples by rank: 4 each, or 3, 4, 5, … with none on the last of several ranks."""
    if not uneven:
        return [4] * dear.size()
    counts = [3 + rank for rank in range(dear.size())]
    return counts if dear.size() == 1 else [*counts[:-1], 0]


def _batch(seed: int, dims: int, counts: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, slice]:
    """The whole batch, weights that make its gradient uneven, and this rank's part."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(counts), FEATURES, *(5, 4, 2)[: dims - 2])
    x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64) + 7
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    start = sum(counts[: dear.rank()])
    return x.to(dtype), weights.to(dtype), slice(start, start + counts[dear.rank()])


OPTIONS = [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.7}]


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(("options", "dims"), [*((each, 4) for each in OPTIONS), ({}, 2), ({}, 3), ({}, 5)], ids=str)
def test_it_equals_batch_norm_on_the_whole_batch(options: dict[str, Any], dims: int, uneven: bool) -> None:
    torch.manual_seed(1)
    whole = PLAIN[dims](FEATURES, **options).double()
    if whole.affine:
        nn.init.normal_(whole.weight)
        nn.init.normal_(whole.bias)
    synced = dear.SyncBatchNorm(FEATURES, **options).double()
    synced.load_state_dict(whole.state_dict())
    for step in range(3):
        x, weights, mine = _batch(step, dims, _counts(uneven), torch.float64)
        x_whole, x_mine = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        expected, got = whole(x_whole), synced(x_mine)
        (expected * weights).sum().backward()
        (got * weights[mine]).sum().backward()
        torch.testing.assert_close(got, expected[mine], rtol=0, atol=1e-12)
        torch.testing.assert_close(x_mine.grad, x_whole.grad[mine], rtol=0, atol=1e-12)
        for name, parameter in whole.named_parameters():
            total = dear.allreduce(synced.get_parameter(name).grad, op=dear.Sum)
            torch.testing.assert_close(total, parameter.grad.flatten(), rtol=0, atol=1e-11 * (step + 1))
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(synced.get_buffer(name), buffer, rtol=0, atol=1e-12)
    whole.eval()
    synced.eval()
    torch.testing.assert_close(synced(x[mine]), whole(x)[mine], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_types_and_layouts(layer: torch.dtype, inputs: torch.dtype) -> None:
    whole, synced = nn.BatchNorm2d(FEATURES).to(layer), dear.SyncBatchNorm(FEATURES).to(layer)
    x, weights, mine = _batch(0, 4, _counts(True), inputs)
    x, weights = x.contiguous(memory_format=torch.channels_last), weights.contiguous(memory_format=torch.channels_last)
    x_whole, x_mine = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
    expected, got = whole(x_whole), synced(x_mine)
    (expected * weights).sum().backward()
    (got * weights[mine]).sum().backward()
    assert got.dtype == expected.dtype
    assert x_mine.grad.dtype == x_whole.grad.dtype
    assert got.is_contiguous(memory_format=torch.channels_last)
    atol = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}[inputs]
    torch.testing.assert_close(got, expected[mine], rtol=0, atol=atol)
    torch.testing.assert_close(x_mine.grad, x_whole.grad[mine], rtol=0, atol=atol)
    torch.testing.assert_close(synced.running_var, whole.running_var, rtol=2e-2, atol=0)


def test_a_whole_network_trains_as_in_one_process() -> None:
    """Beside the collectives of the optimizer, which are in flight while the layers exchange their statistics."""
    torch.manual_seed(3)
    plain = nn.Sequential(
        nn.Conv2d(FEATURES, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3),
        nn.BatchNorm2d(5),
        nn.Flatten(),
        nn.Linear(30, 2),
    ).double()
    model = dear.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    reference = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model, threshold_mb=1e-4
    )
    for step in range(4):
        x, _, mine = _batch(step, 4, _counts(False), torch.float64)
        for net, opt, part in ((plain, reference, x), (model, optimizer, x[mine])):
            opt.zero_grad()
            net(part).square().mean().backward()
            opt.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-12)


def test_evaluation_with_running_statistics_may_run_on_one_rank() -> None:
    layer = dear.SyncBatchNorm(FEATURES)
    layer(torch.randn(4, FEATURES))
    layer.eval()
    if dear.rank() == 0:
        assert layer(torch.randn(1, FEATURES)).shape == (1, FEATURES)
    layer.train()
    with torch.no_grad():
        layer(torch.randn(4, FEATURES))


def test_ranks_in_different_layers_are_told_on_all_ranks() -> None:
    if dear.size() == 1:
        pytest.skip("one rank cannot differ from itself")
    width = 3 if dear.rank() == 0 else 4
    with pytest.raises(BatchMismatch, match=r"with 3 features .* with 4 features"):
        dear.SyncBatchNorm(width)(torch.randn(2, width))
    layer = dear.SyncBatchNorm(FEATURES)
    x = torch.randn(2, FEATURES, requires_grad=True)
    first, second = layer(x).sum(), layer(x).sum()
    early, late = (first, second) if dear.rank() == 0 else (second, first)
    for loss in (early, late):
        with pytest.raises(BatchMismatch, match="backward pass"):
            loss.backward()


def test_bad_inputs_raise() -> None:
    layer = dear.SyncBatchNorm(FEATURES)
    with pytest.raises(ValueError, match=r"at least 2 dimensions.*\(3,\)"):
        layer(torch.randn(3))
    with pytest.raises(ValueError, match=r"3 features.*\(2, 4\)"):
        layer(torch.randn(2, 4))
    with pytest.raises(ValueError, match="floating-point"):
        layer(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1 if dear.rank() == 0 else 0, FEATURES))


def test_conversion_keeps_what_a_layer_is() -> None:
    shared = nn.BatchNorm1d(FEATURES, eps=0.5, momentum=None)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.BatchNorm2d(4, affine=False)), "c": nn.ReLU()})
    model["b"].eval()
    before = dict(model.state_dict())
    converted = dear.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert converted["a"] is converted["b"][0]
    assert isinstance(converted["b"][1], dear.SyncBatchNorm)
    assert converted["b"][1].weight is None
    assert (converted["a"].eps, converted["a"].momentum, converted["b"][1].training) == (0.5, None, False)
    assert converted["a"].weight is shared.weight
    assert dict(converted.state_dict()).keys() == before.keys()
    assert isinstance(dear.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm3d(2)), dear.SyncBatchNorm)
    with pytest.raises(ValueError, match=r"layer '0' is lazy"):
        dear.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_compiled_it_takes_batches_of_any_size() -> None:
    """The second size makes the compiler go on with symbolic ones, which no message has."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(FEATURES, 4), dear.SyncBatchNorm(4), nn.Linear(4, 1)).double()
    model = copy.deepcopy(plain)
    compiled = torch.compile(model, backend="eager")
    for size in (4, 4, 3, 4, 2):
        x = torch.randn(size, FEATURES, dtype=torch.float64)
        for net in (plain, compiled):
            net(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
