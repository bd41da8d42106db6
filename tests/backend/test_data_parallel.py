"""Stock DistributedDataParallel and ZeroRedundancyOptimizer: what one process learns, and bit for bit what gloo gives."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.backend.training import alone, close, loss_of, model_of, my_batch, parameters_of, sgd, train, whole_batch
from tests.backend.world import ALL, SEVERAL, group_of, same_everywhere
from tests.spmd_plugin import RANK, SIZE

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a bucket for each": {"bucket_cap_mb": 1e-5},
    "some buckets": {"bucket_cap_mb": 4e-4},
    "static graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "views, many buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5},
    "static graph, views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused are looked for": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_what_one_process_learns(name: str) -> None:
    model = model_of()
    expected = alone(model)
    wrapped = DistributedDataParallel(model, **OPTIONS[name])
    train(wrapped, sgd(wrapped.parameters()))
    close(parameters_of(model), expected)
    same_everywhere(parameters_of(model))


@SEVERAL
@pytest.mark.parametrize("name", list(OPTIONS))
def test_the_parameters_that_gloo_gives(name: str) -> None:
    """Of two ranks bit for bit: a sum of two has one order."""
    trained = []
    for backend in (None, "gloo"):
        with group_of(backend=backend) as group:
            model = model_of().float()
            wrapped = DistributedDataParallel(model, process_group=group, **OPTIONS[name])
            optimizer = sgd(wrapped.parameters())
            for step in range(3):
                optimizer.zero_grad()
                x, y = my_batch(step)
                loss_of(wrapped, (x.float(), y.float())).backward()
                optimizer.step()
            trained.append(parameters_of(model))
            del wrapped
    close(*trained, tolerance=0.0 if SIZE == 2 else 1e-5)


def test_models_begin_as_rank_0s() -> None:
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(float(RANK))
    DistributedDataParallel(model)
    same_everywhere([*model.parameters(), *model.buffers()])
    assert model[1].running_mean[0] == 0.0


def test_buffers_are_rank_0s_in_each_forward() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    wrapped = DistributedDataParallel(model)
    for _ in range(3):
        wrapped(torch.randn(5, 3) + RANK).sum().backward()
    wrapped.eval()
    model[1].running_mean.add_(RANK)
    wrapped.train()
    wrapped(torch.zeros(5, 3))
    same_everywhere([model[1].running_mean])


@pytest.mark.parametrize("view", [False, True])
def test_no_sync_adds_gradients_up(view: bool) -> None:
    model = model_of()
    reference = copy.deepcopy(model)
    (sum(loss_of(reference, whole_batch(step)) for step in range(3))).backward()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=1e-5)
    for step in range(3):
        with wrapped.no_sync() if step < 2 else contextlib.nullcontext():
            loss_of(wrapped, my_batch(step)).backward()
    close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def test_a_parameter_that_some_ranks_do_not_use() -> None:
    """Its gradient is the average all the same."""
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    model = nn.ModuleDict({"first": first, "second": second})

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner["first"](x) if RANK == 0 else self.inner["second"](x)

    wrapped = DistributedDataParallel(Either(), find_unused_parameters=True)
    wrapped(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    expected = torch.full((3, 3), 2.0 / SIZE, dtype=torch.float64)
    close([first.weight.grad], [expected])
    if SIZE > 1:
        close([second.weight.grad], [expected * (SIZE - 1)])


@pytest.mark.parametrize("hook", ["allreduce", "fp16", "powersgd"])
def test_hooks(hook: str) -> None:
    model = model_of().float()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-5 if hook != "powersgd" else 25)
    hooks = {
        "allreduce": (None, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "powersgd": (PowerSGDState(None, matrix_approximation_rank=6, start_powerSGD_iter=2), powerSGD_hook),
    }
    wrapped.register_comm_hook(*hooks[hook])
    optimizer = sgd(wrapped.parameters())
    for step in range(4):
        optimizer.zero_grad()
        x, y = my_batch(step)
        loss_of(wrapped, (x.float(), y.float())).backward()
        optimizer.step()
    same_everywhere(parameters_of(model))
    expected = [one.float() for one in alone(model_of(), steps=range(4))]
    close(parameters_of(model), expected, tolerance={"allreduce": 1e-5, "powersgd": 0.05}.get(hook, 0.02))


@SEVERAL
def test_ranks_with_more_data_than_others() -> None:
    """Join's shadow operations, of ranks that have no batches any more."""
    model = model_of()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    optimizer = sgd(wrapped.parameters())
    with Join([wrapped]):
        train(wrapped, optimizer, range(RANK + 1))
    same_everywhere(parameters_of(model))


@SEVERAL
def test_models_of_two_groups_train_at_once() -> None:
    """Two DDP models, each along groups of its own, issued in one order within each of them."""
    with group_of() as first, group_of() as second:
        models = [model_of(), model_of(2)]
        expected = [alone(model) for model in models]
        wrapped = [
            DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-5)
            for model, group in zip(models, (first, second), strict=True)
        ]
        optimizers = [sgd(one.parameters()) for one in wrapped]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(loss_of(one, my_batch(step)) for one in wrapped).backward()
            for optimizer in optimizers:
                optimizer.step()
        for model, wanted in zip(models, expected, strict=True):
            close(parameters_of(model), wanted)
        del wrapped


# - Each rank updates a part


@pytest.mark.parametrize("broadcasts", ["plain", "buckets"])
def test_zero_redundancy(broadcasts: str) -> None:
    model = model_of()
    expected = alone(model, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    wrapped = DistributedDataParallel(model)
    as_view = broadcasts == "buckets"
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=as_view
    )
    train(wrapped, optimizer)
    close(parameters_of(model), expected)
    same_everywhere(parameters_of(model))


def test_zero_redundancy_gathers_its_state() -> None:
    model = model_of()
    twin = copy.deepcopy(model)
    plain = torch.optim.Adam(twin.parameters(), lr=0.01)
    for step in range(3):
        plain.zero_grad()
        loss_of(twin, whole_batch(step)).backward()
        plain.step()
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)
    train(wrapped, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if RANK == 0:
        found = optimizer.state_dict()["state"]
        expected = plain.state_dict()["state"]
        assert sorted(found) == sorted(expected)
        for number, state in expected.items():
            close([found[number]["exp_avg"]], [state["exp_avg"]])
    dist.barrier()


def test_collectives_that_backward_goes_through() -> None:
    from torch.distributed.nn import functional

    x = torch.full((3,), float(RANK + 1), requires_grad=True)
    (functional.all_reduce(x) * (RANK + 1)).sum().backward()
    assert x.grad is not None
    close([x.grad], [torch.full((3,), float(sum(rank + 1 for rank in ALL)))])
    y = torch.full((3,), float(RANK + 1), requires_grad=True)
    (torch.stack(functional.all_gather(y)) * (RANK + 1)).sum().backward()
    assert y.grad is not None
    close([y.grad], [torch.full((3,), float(sum(rank + 1 for rank in ALL)))])
