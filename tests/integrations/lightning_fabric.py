"""Runs inside every rank: a loop over Fabric with dear is the same loop with DDP, and with one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.strategies import DDPStrategy
from torch.nn import functional

import dear
from dear.integrations.lightning import NAMES, DearEnvironment, DearFabricStrategy
from tests.integrations.lightning_models import WIDTH, assert_same, data, loader


def fabric(strategy: Any, precision: Any = "64-true") -> lightning.Fabric:
    if strategy == "ddp":
        strategy = DDPStrategy(cluster_environment=None if "TORCHELASTIC_RUN_ID" in os.environ else DearEnvironment())
    if strategy == "fsdp":
        strategy = DearFabricStrategy("fsdp", threshold_mb=0.0001)
    one = strategy == "one"
    made = lightning.Fabric(
        accelerator="cpu",
        strategy="auto" if one else strategy,
        devices=1 if one else dear.local_size(),
        precision=precision,
    )
    made.launch()
    return made


def train(
    strategy: Any, path: Path | None = None, *, apart: bool = False, epochs: int = 3, resume: bool = False, **clip: Any
) -> tuple[torch.nn.Module, list[float]]:
    """A model, and what clipping returned; windows of two batches. With a `path`, it is saved there, or goes on from it."""
    lightning.seed_everything(0 if strategy == "one" else dear.rank(), verbose=False)
    runner = fabric(strategy)
    net = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    net[1].track_running_stats = False
    model: Any
    optimizer: Any
    if apart:
        model = runner.setup_module(net)
        optimizer = runner.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model, optimizer = runner.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    batches = runner.setup_dataloaders(loader(whole=strategy == "one"), use_distributed_sampler=False)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if resume:
        assert path is not None
        runner.load(path, state)
    norms = []
    for epoch in range(state["epoch"], epochs):
        for number, (inputs, targets) in enumerate(batches):
            last = number % 2 == 1
            with runner.no_backward_sync(model, enabled=not last):
                runner.backward(functional.mse_loss(model(inputs), targets) / 2)
            if last:
                if clip:
                    norms.append(runner.clip_gradients(model, optimizer, **clip))
                optimizer.step()
                optimizer.zero_grad()
        state["epoch"] = epoch + 1
    if path is not None and not resume:
        runner.save(path, state)
    return net, [float(norm) for norm in norms if norm is not None]


@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.05}, {"clip_val": 0.01}], ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["setup", "setup_module"])
@pytest.mark.parametrize("strategy", ["dear", "fsdp"])
def test_a_loop_is_that_of_ddp(strategy: str, apart: bool, clip: Any) -> None:
    mine, norms = train(strategy, apart=apart, **clip)
    theirs, expected = train("ddp", apart=apart, **clip)
    # The bias in front of BatchNorm has no gradient but rounding, and norms are rounded otherwise from other pieces.
    assert_same(mine, theirs, 1e-10 if "max_norm" in clip else 1e-12)
    assert norms == pytest.approx(expected, rel=1e-12)
    assert len(norms) == (12 if "max_norm" in clip else 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("dear", "dear"), ("dear", "ddp"), ("ddp", "dear"), ("dear", "one")),
        *(("fsdp", "fsdp"), ("fsdp", "dear"), ("dear", "fsdp"), ("fsdp", "ddp"), ("ddp", "fsdp"), ("fsdp", "one")),
    ],
)
def test_a_loop_is_resumed_by_others(first: str, second: str, folder: Path) -> None:
    path = folder / "fabric.ckpt"
    train(first, path, epochs=2)
    resumed, _ = train(second, path, resume=True)
    if second != "one":  # whose batches are normalized together
        assert_same(resumed, train("ddp")[0], 1e-12)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_strategy_by_its_name(name: str) -> None:
    mine, _ = train(name)
    if name == "dear_co2":
        assert all(torch.isfinite(value).all() for value in mine.state_dict().values())
    else:
        assert_same(mine, train("ddp")[0], 1e-12)


@pytest.mark.parametrize("mine", ["dear", "fsdp"])
def test_two_optimizers_of_one_module_and_bf16(mine: str) -> None:
    found = []
    for strategy in mine, "ddp":
        lightning.seed_everything(dear.rank(), verbose=False)
        runner = fabric(strategy, "bf16-mixed")
        net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Linear(8, 1))
        made = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in net]
        model, first, second = runner.setup(net, *made)
        schedule = torch.optim.lr_scheduler.ExponentialLR(made[0], 0.9)
        for inputs, targets in loader(dtype=torch.float32):
            runner.backward(functional.mse_loss(model(inputs), targets))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        found.append(net)
        assert first.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**8)
    assert_same(*found)


def test_collectives_samplers_and_refusals() -> None:
    runner = fabric("dear")
    assert (runner.global_rank, runner.world_size) == (dear.rank(), dear.size())
    assert runner.all_reduce(torch.tensor(float(dear.rank())), reduce_op="sum") == sum(range(dear.size()))
    assert runner.all_gather(torch.tensor([dear.rank()])).flatten().tolist() == list(range(dear.size()))
    assert runner.broadcast(dear.rank(), 0) == 0
    runner.barrier()
    batches: Any = runner.setup_dataloaders(torch.utils.data.DataLoader(data(), 4))
    assert sum(len(inputs) for inputs, _ in batches) == 64 // dear.size()
    with pytest.raises(TypeError, match="has no 'static_graph'"):
        DearFabricStrategy(static_graph=True)
    stranger = lightning.fabric.wrappers._FabricModule(torch.nn.Linear(1, 1), runner.strategy)
    with pytest.raises(TypeError, match="setup"), runner.no_backward_sync(stranger):
        pass
