"""Runs inside every rank: libraries that only look on, or only call the loop, find in dear what they find in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, EMAHandler
from ignite.metrics import Loss
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter

import dear

ROWS, WIDTH = 32, 6


def setting(**options: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(dear.rank())
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, dear.DistributedOptimizer(inner, model, num_nearby_layers=1, **options)


def batches(*, mine: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four, in each of which every rank has its rows."""
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = (inputs.sum(1) > 0).long()
    rows = slice(dear.rank(), None, dear.size()) if mine else slice(None)
    return [(x[rows], y[rows]) for x, y in zip(inputs.chunk(4), labels.chunk(4), strict=True)]


def trained(epochs: int = 2) -> tuple[torch.nn.Module, Any]:
    model, optimizer = setting()
    for _ in range(epochs):
        for inputs, labels in batches():
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model, optimizer


def test_torchmetrics_gathers_over_the_default_group() -> None:
    model, _ = trained()
    accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=2, average="micro")
    mean = torchmetrics.MeanMetric().set_dtype(torch.float64)
    for inputs, labels in batches():
        accuracy.update(model(inputs), labels)
        mean.update(functional.cross_entropy(model(inputs), labels).detach(), len(inputs))
    whole = [(model(inputs), labels) for inputs, labels in batches(mine=False)]
    outputs, labels = (torch.cat(parts) for parts in zip(*whole, strict=True))
    assert float(accuracy.compute()) == pytest.approx(float((outputs.argmax(1) == labels).double().mean()))
    assert float(mean.compute()) == pytest.approx(float(functional.cross_entropy(outputs, labels)), rel=1e-12)
    accuracy.reset()
    assert float(accuracy.update_count) == 0


def test_ignite_runs_the_loop_and_saves_it(folder: Path) -> None:
    """An Engine with its handlers: evaluation in between, an EMA, a checkpoint on rank 0 alone, early stopping."""

    def run(epochs: int, resume: Path | None = None) -> tuple[torch.nn.Module, Any, Any]:
        model, optimizer = setting()

        def step(engine: Engine, batch: Any) -> float:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return loss.item()

        trainer = Engine(step)
        evaluator = create_supervised_evaluator(model, {"loss": Loss(functional.cross_entropy)})
        ema = EMAHandler(model, momentum=0.1)
        ema.attach(trainer, event=Events.ITERATION_COMPLETED)
        stopping = EarlyStopping(10, lambda engine: -engine.state.metrics["loss"], trainer)
        evaluator.add_event_handler(Events.COMPLETED, stopping)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(batches()))
        parts = {"trainer": trainer, "model": model, "optimizer": optimizer}
        if dear.rank() == 0:
            saver = DiskSaver(str(folder), create_dir=True, require_empty=False)
            trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(parts, saver, n_saved=None))
        if resume is not None:
            Checkpoint.load_objects(parts, torch.load(resume, weights_only=True))
        trainer.run(batches(), max_epochs=epochs)
        dear.barrier()
        return model, evaluator.state.metrics["loss"], ema.ema_model

    model, loss, average = run(4)
    resumed, again, _ = run(4, folder / "checkpoint_8.pt")
    assert loss == again
    for one, other, mean in zip(model.parameters(), resumed.parameters(), average.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.isfinite(mean).all()
        assert not torch.equal(one, mean)


def test_averaged_models_read_parameters_in_flight() -> None:
    """The average of the values that every step leaves, though their gathers are under way when it looks."""
    model, optimizer = setting()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = [param.detach().clone() for param in model.parameters()]
    for number, (inputs, labels) in enumerate(batches()):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        average.update_parameters(model)
        for mean, param in zip(expected, model.parameters(), strict=True):
            mean.copy_(param.detach() if number == 0 else mean.lerp(param.detach(), 0.5))
    for mean, found in zip(expected, average.module.parameters(), strict=True):
        torch.testing.assert_close(found, mean, rtol=1e-12, atol=0)
    told = dear.allgather_object([mean.tolist() for mean in expected])
    assert all(one == told[0] for one in told)


def test_tensorboard_on_rank_0(folder: Path) -> None:
    writer = SummaryWriter(str(folder)) if dear.rank() == 0 else None
    model, optimizer = setting()
    told = []
    for step, (inputs, labels) in enumerate(batches()):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        mean = float(dear.allreduce(loss.detach()))
        if writer is not None:
            told.append(mean)
            writer.add_scalar("loss", mean, step)
            for name, param in model.named_parameters():  # while the others go on
                writer.add_histogram(name, param, step)
    if writer is not None:
        writer.close()
        events = EventAccumulator(str(folder), {"histograms": 0}).Reload()
        assert [event.value for event in events.Scalars("loss")] == pytest.approx(told, rel=1e-6)
        assert len(events.Histograms("0.weight")) == 4
    dear.barrier()


def test_wandb_offline_on_rank_0(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    run = wandb.init(mode="offline", dir=str(folder), project="dear") if dear.rank() == 0 else None
    model, optimizer = setting()
    if run is not None:
        run.watch(model, log="parameters", log_freq=1)
    for inputs, labels in batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        mean = dear.allreduce(loss.detach())
        if run is not None:
            run.log({"loss": float(mean)})
    if run is not None:
        assert run.summary["loss"] == float(mean)
        run.finish()
        assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    dear.barrier()
