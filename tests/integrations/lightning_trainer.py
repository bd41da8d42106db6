"""Runs inside every rank: what a Trainer does over dear is what it does over DDP, and in one process."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import MixedPrecision
from torch.nn import functional

import dear
from dear.integrations.lightning import NAMES, DearStrategy
from dear.integrations.lightning_environment import environment_of
from overlap.job.launch import LaunchError
from tests.integrations.lightning_models import WIDTH, Regression, assert_same, data, ddp, fit, loader, trainer
from tests.spmd.listening import heard


def test_losses_are_those_of_ddp_and_of_one_process(ours: Any) -> None:
    module, _ = fit(ours())
    theirs, _ = fit(ddp())
    alone, _ = fit("one")
    assert len(module.seen) == 6
    if dear.size() <= 2:  # sums of more ranks are made in another order than DDP's
        assert module.seen == theirs.seen
        assert_same(module, theirs)
    assert_same(module, alone, 1e-12)
    for (name, value), (other, expected) in zip(module.seen, alone.seen, strict=True):
        assert name == other
        assert value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "32-true"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"val_check_interval": 3, "limit_train_batches": 7, "detect_anomaly": True},
    ],
    ids=str,
)
def test_options_of_the_trainer_mean_what_they_mean_with_ddp(ours: Any, options: Any) -> None:
    dtype = torch.float64 if "precision" not in options else torch.float32
    module, _ = fit(ours(), dtype=dtype, **options)
    theirs, _ = fit(ddp(), dtype=dtype, **options)
    assert module.seen == theirs.seen
    assert_same(module, theirs)


def test_clipping_by_norm_while_accumulating(ours: Any) -> None:
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    module, _ = fit(ours(), **options)
    assert_same(module, fit(ddp(), **options)[0], 1e-12)
    assert_same(module, fit("one", **options)[0], 1e-12)
    with pytest.raises(AssertionError):
        assert_same(module, fit("one", accumulate_grad_batches=2)[0], 1e-12)


def test_a_scaler_skips_and_clips_as_with_ddp(ours: Any) -> None:
    def options() -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        return {"plugins": MixedPrecision("16-mixed", "cpu", scaler), "precision": None, "gradient_clip_val": 0.5}

    module, _ = fit(ours(), dtype=torch.float32, **options())
    theirs, _ = fit(ddp(), dtype=torch.float32, **options())
    assert_same(module, theirs, 1e-5)


class Gan(Regression):
    """Manual optimization: two optimizers in turn, each over several batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_index: int) -> None:
        maker, judge = self.optimizers()
        real, last = batch[1], batch_index % 2 == 1
        with maker.toggle_model(sync_grad=last):
            made = self.net(batch[0])
            loss = functional.softplus(-self.critic(made)).mean()
            self.manual_backward(loss)
            if last:
                self.clip_gradients(maker, gradient_clip_val=0.1, gradient_clip_algorithm="value")
                maker.step()
                maker.zero_grad()
        self.toggle_optimizer(judge)
        against = (
            functional.softplus(self.critic(made.detach())).mean() + functional.softplus(-self.critic(real)).mean()
        )
        self.manual_backward(against)
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)
        self.log_dict({"loss": loss, "against": against}, sync_dist=True, on_epoch=True, on_step=False)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self) -> Any:
        both = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.net, self.critic)]
        return both, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in both]


def test_manual_optimization_with_two_optimizers(ours: Any) -> None:
    module, runner = fit(ours(), Gan)
    theirs, _ = fit(ddp(find_unused_parameters=True), Gan)
    assert runner.global_step == 3 * (8 + 4)
    assert [value for _, value in module.seen] == pytest.approx([value for _, value in theirs.seen], rel=1e-12)
    assert_same(module, theirs, 1e-12)  # DDP sums the batches of a window in another order


class OnSameGradients(Regression):
    """Looks at gradients where Lightning's users do."""

    def _norm(self) -> float:
        return sum(float(param.grad.square().sum()) for param in self.parameters() if param.grad is not None)

    def on_after_backward(self) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            self.seen.append(self._norm())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(self._norm())
        for param in self.parameters():
            param.grad.mul_(0.5)


@pytest.mark.parametrize("clipped", [None, 0.1])
def test_hooks_find_averages_in_grad_and_may_change_them(ours: Any, clipped: float | None) -> None:
    options = {"gradient_clip_val": clipped, "accumulate_grad_batches": 2}
    module, _ = fit(ours(), OnSameGradients, **options)
    theirs, _ = fit(ddp(), OnSameGradients, **options)
    numbers = [value for value in module.seen if isinstance(value, float)]
    assert numbers == pytest.approx([value for value in theirs.seen if isinstance(value, float)], rel=1e-12)
    assert_same(module, theirs, 1e-12)


class Unknown(torch.optim.SGD):
    """May look at the loss, for all dear knows."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("make", [lambda: Regression(torch.optim.LBFGS), lambda: Regression(Unknown)])
def test_optimizers_that_decide_by_the_loss(ours: Any, make: Any) -> None:
    assert_same(fit(ours(), make)[0], fit("one", make)[0], 1e-9)


class ManualUnknown(Gan):
    def configure_optimizers(self) -> Any:
        both = [Unknown(part.parameters(), lr=1e-2) for part in (self.net, self.critic)]
        return both, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in both]


def test_manual_optimization_with_optimizers_that_may_decide_by_the_loss() -> None:
    assert_same(fit("dear", ManualUnknown)[0], fit(ddp(find_unused_parameters=True), ManualUnknown)[0], 1e-12)


class Plateau(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}

    def on_train_epoch_start(self) -> None:
        self.seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def test_plateaus_and_early_stopping(ours: Any) -> None:
    def run(strategy: Any) -> Any:
        stopping = callbacks.EarlyStopping("val", patience=2, min_delta=0.05)
        return fit(strategy, Plateau, callbacks=[stopping], max_epochs=12)

    (module, runner), (theirs, other) = run(ours()), run(ddp())
    assert module.seen == theirs.seen
    assert runner.current_epoch == other.current_epoch < 12
    assert len({value for value in module.seen if isinstance(value, float)}) > 1, "the learning rate was reduced"


class Averaging(callbacks.WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9))


@pytest.mark.parametrize("make", [Averaging, lambda: callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)])
def test_averages_of_weights(make: Any) -> None:
    module, _ = fit("dear", callbacks=[make()])
    theirs, _ = fit(ddp(), callbacks=[make()])
    assert module.seen == theirs.seen
    assert_same(module, theirs)


@pytest.mark.parametrize("make", [Averaging, lambda: callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)])
def test_averages_of_weights_are_refused_where_each_rank_has_a_share(make: Any) -> None:
    with pytest.raises(ValueError, match=r"Averaging reads and writes all parameters .* strategy='dear'"):
        fit("dear_fsdp", callbacks=[make()])


class Measured(Regression):
    """Logs norms of weights, as users do; and one rank looks at what only it has made."""

    def on_train_batch_end(self, *_: Any) -> None:
        with dear.whole(self):
            self.seen.append(sum(float(param.square().sum()) for param in self.parameters()))
            if self.trainer.is_global_zero:
                self(torch.ones(1, WIDTH, dtype=torch.float64))

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.seen.append(sum(float(value.sum()) for value in self.state_dict().values()))


def test_parameters_are_read_where_they_are_whole(ours: Any) -> None:
    module, runner = fit(ours(), Measured, num_sanity_val_steps=2)
    theirs, _ = fit(ddp(), Measured, num_sanity_val_steps=2)
    assert module.seen == theirs.seen
    assert_same(module, theirs)
    freed = runner.optimizers[0].strategy.name == "fsdp"
    assert [bucket.freed for bucket in runner.optimizers[0].buckets] == [freed] * (2 if freed else 1)


class Normalized(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(16))


def test_validation_has_rank_0s_buffers_as_with_ddp(ours: Any) -> None:
    module, _ = fit(ours(), Normalized)
    theirs, _ = fit(ddp(), Normalized)
    assert module.seen == theirs.seen


def test_validate_test_and_predict(ours: Any) -> None:
    found = []
    for strategy in ours(), ddp():
        lightning.seed_everything(dear.rank(), verbose=False)
        module, runner = Regression(), trainer(strategy, max_epochs=1)
        found.append([runner.validate(module, loader(), verbose=False)])
        runner.fit(module, loader(), loader())
        found[-1] += [runner.test(module, loader(), verbose=False), runner.validate(module, loader(), verbose=False)]
        predicted = runner.predict(module, loader())
        assert predicted is not None
        found[-1] += [torch.cat(predicted).tolist()]  # type: ignore[arg-type]
        runner.fit_loop.max_epochs = 2
        runner.fit(module, loader(), loader())
        found[-1] += module.seen
    assert found[0] == found[1]


def test_samplers_are_put_in() -> None:
    seen = []
    for strategy in "dear", ddp():
        lightning.seed_everything(dear.rank(), verbose=False)
        module, runner = Regression(), trainer(strategy, use_distributed_sampler=True)
        whole = torch.utils.data.DataLoader(data(), 4, shuffle=True, drop_last=True)
        runner.fit(module, whole, loader())
        seen.append(module.seen)
        assert len(runner.train_dataloader) == 64 // dear.size() // 4  # type: ignore[arg-type]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"dear", "dear_co2"}))
def test_every_synchronous_strategy_by_its_name(name: str) -> None:
    module, runner = fit(name)
    assert runner.optimizers[0].strategy.name == NAMES[name]
    assert_same(module, fit(ddp())[0], 0.0 if dear.size() <= 2 else 1e-12)


def test_co2_evaluates_and_saves_the_average(folder: Path) -> None:
    saved = callbacks.ModelCheckpoint(folder, save_last=True)
    module, runner = fit(
        DearStrategy("co2", outer_frequency=3), callbacks=[saved], enable_checkpointing=True, limit_train_batches=7
    )
    runner.strategy.barrier()
    assert module.seen[-1][1] < module.seen[1][1]
    states = dear.allgather_object({name: value.tolist() for name, value in module.state_dict().items()})
    assert all(state == states[0] for state in states)
    torch.testing.assert_close(torch.load(folder / "last.ckpt", weights_only=False)["state_dict"], module.state_dict())


def test_options_reach_the_optimizer_and_unknown_ones_raise() -> None:
    _, runner = fit(DearStrategy(threshold_mb=None, num_nearby_layers=1, compression=dear.Compression.bf16))
    assert len(runner.optimizers[0].buckets) == 2
    fit(DearStrategy("oss", gather_dtype=torch.bfloat16), max_epochs=1, dtype=torch.float32, precision=None)
    with pytest.raises(TypeError, match="threshold_mb"):
        DearStrategy(treshold_mb=1)
    with pytest.raises(TypeError, match="find_unused_parameters"):
        DearStrategy(find_unused_parameters=True)
    with pytest.raises(TypeError, match="has no 'threshold_mb'"):
        DearStrategy("wfbp", threshold_mb=1)
    with pytest.raises(TypeError, match="eager should be"):
        DearStrategy(eager="yes")
    with pytest.raises(ValueError, match="one of"):
        DearStrategy("ddp")
    with pytest.raises(ValueError, match="gradient accumulation"):
        DearStrategy(backward_passes_per_step=2)


class WrappedByHand(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer = dear.DistributedOptimizer(optimizer, self, num_nearby_layers=1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def test_optimizers_that_the_module_wraps_itself_stay() -> None:
    module, runner = fit("dear", WrappedByHand)
    assert len(runner.optimizers[0].buckets) == 2
    assert_same(module, fit(ddp())[0])


def test_a_trainer_that_knows_one_process_is_told_of() -> None:
    with heard(logging.WARNING) as alone:
        fit("one", WrappedByHand, max_epochs=1)
    with heard(logging.WARNING) as together:
        fit("dear", WrappedByHand, max_epochs=1)
    told = [line for line in alone if "knows of 1 process" in line]
    assert len(told) == int(dear.size() > 1 and dear.rank() == 0)
    assert not [line for line in together if "process" in line]


_SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train"}
_MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
_RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "ours"),
    [
        ({}, False),
        (_MPIRUN, True),
        ({**_SRUN, **_MPIRUN}, True),
        (_SRUN, False),
        ({**_SRUN, "SLURM_JOB_NAME": "interactive"}, True),
        (_RANKS, True),
        ({**_RANKS, "TORCHELASTIC_RUN_ID": "1"}, False),
    ],
)
def test_who_tells_lightning_its_ranks(environ: Any, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*_SRUN, *_MPIRUN, *_RANKS, "TORCHELASTIC_RUN_ID", *os.environ}:
        if name.startswith(("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")) or name in _RANKS:
            monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert (environment_of() is not None) is ours


def test_a_trainer_of_other_processes_than_the_job_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.excepthook", lambda *_: None)
    with pytest.raises(LaunchError, match=f"give devices={dear.local_size()}, num_nodes=1"):
        trainer("dear", devices=dear.local_size() + 1)


def test_what_lightning_puts_around_an_optimizer_is_the_optimizer() -> None:
    """It poses as our class: each call reaches the user's optimizer once."""

    class Looks(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            (posing,) = (self.optimizers(),)
            real = self.trainer.optimizers[0]
            assert isinstance(posing, type(real))
            assert posing.param_groups is real.param_groups
            assert posing.state.keys() == real.state.keys()
            calls = real._engine.closing._calls
            before = calls.last
            posing.zero_grad()
            assert calls.last == before + 2, "one call counts two"
            self.seen.append(posing.param_groups[0]["lr"])

    module, _ = fit("dear", Looks)
    assert module.seen[0] == 1e-2


def test_collectives_of_lightning() -> None:
    _, runner = fit("dear", max_epochs=1)
    strategy, mine = runner.strategy, torch.tensor([float(dear.rank())])
    assert strategy.broadcast({"rank": dear.rank()}, 0) == {"rank": 0}
    assert strategy.all_gather(mine).flatten().tolist() == list(range(dear.size()))
    assert strategy.reduce(mine.clone(), reduce_op="sum").item() == sum(range(dear.size()))
    assert strategy.reduce_boolean_decision(dear.rank() == 0, all=False)
    assert strategy.reduce_boolean_decision(dear.rank() == 0) == (dear.size() == 1)
    assert runner.world_size == dear.size()
    assert runner.global_rank == dear.rank()
