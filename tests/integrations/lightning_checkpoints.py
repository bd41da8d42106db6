"""Runs inside every rank: checkpoints of a Trainer over dear are Lightning's plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks

import dear
from tests.integrations.lightning_models import Regression, assert_same, ddp, fit, loader

FSDP = "dear_fsdp"


def double() -> Regression:
    """Before it is loaded: with 64-true alone, Lightning loads into the fp32 parameters that it converts afterwards."""
    return Regression().double()


def _checkpoints(strategy: Any, folder: Path, **options: Any) -> tuple[Regression, Path]:
    """Trained for two of three epochs, and the last checkpoint of that."""
    saved = callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, monitor="val")
    module, runner = fit(strategy, double, callbacks=[saved], enable_checkpointing=True, max_epochs=2, **options)
    runner.strategy.barrier()
    return module, folder / "epoch=1.ckpt"


def test_checkpoints_are_those_of_ddp(ours: Any, folder: Path) -> None:
    _, mine = _checkpoints(ours(), folder / "dear")
    _, theirs = _checkpoints(ddp(), folder / "ddp")
    one, other = (torch.load(path, weights_only=False) for path in (mine, theirs))
    assert one.keys() == other.keys()
    for name in "state_dict", "optimizer_states", "lr_schedulers":
        torch.testing.assert_close(one.pop(name), other.pop(name), rtol=0, atol=0)
    for saved in one, other:
        saved.pop("callbacks")  # paths
    assert one == other


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("dear", "dear"), ("dear", "ddp"), ("ddp", "dear"), ("dear", "one"), ("one", "dear")),
        *((FSDP, FSDP), (FSDP, "dear"), ("dear", FSDP), (FSDP, "ddp"), ("ddp", FSDP), (FSDP, "one"), ("one", FSDP)),
    ],
)
def test_training_is_resumed_by_another_strategy_and_number_of_ranks(first: str, second: str, folder: Path) -> None:
    strategies = {"ddp": ddp}
    if first == "one":
        folder = folder / str(dear.rank())  # each process writes, and rank 0's is read
    _, path = _checkpoints(strategies.get(first, lambda: first)(), folder)
    path = Path(dear.broadcast_object(str(path)))
    module, runner = fit(strategies.get(second, lambda: second)(), double, ckpt_path=path)
    assert runner.current_epoch == 3
    assert len(module.seen) == 2
    assert_same(module, fit("one", double)[0], 1e-12)


def test_a_checkpoint_may_be_written_right_after_it_was_loaded(ours: Any, folder: Path) -> None:
    _, path = _checkpoints(ours(), folder)

    class Again(Regression):
        def on_train_start(self) -> None:
            self.trainer.save_checkpoint(folder / "again.ckpt")

    _, runner = fit(ours(), lambda: Again().double(), ckpt_path=path)
    runner.save_checkpoint(folder / "end.ckpt")
    before, again = (torch.load(one, weights_only=False) for one in (path, folder / "again.ckpt"))
    torch.testing.assert_close(again["optimizer_states"], before["optimizer_states"], rtol=0, atol=0)
    torch.testing.assert_close(again["state_dict"], before["state_dict"], rtol=0, atol=0)
    state = torch.load(folder / "end.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    assert float(state[0]["step"]) == 24


def test_the_best_model_is_tested_and_loaded_by_one_process(ours: Any, folder: Path) -> None:
    found = []
    for name, strategy in ("ours", ours()), ("ddp", ddp()):
        saved = callbacks.ModelCheckpoint(folder / name, monitor="val")
        module, runner = fit(strategy, double, callbacks=[saved], enable_checkpointing=True)
        tested = runner.test(module, loader(), ckpt_path="best", verbose=False)
        found.append((tested, Regression.load_from_checkpoint(saved.best_model_path).state_dict()))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)


def test_ranks_that_do_not_write_collect_no_parameters(ours: Any) -> None:
    """Of a sharded model: each rank would have all of it at once."""

    class Saves(Regression):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen.append(bool(checkpoint["state_dict"]))

    module, runner = fit(ours(), Saves, max_epochs=1)
    runner.strategy.barrier()
    runner._checkpoint_connector.dump_checkpoint()
    assert module.seen[-1] is (dear.rank() == 0 or runner.optimizers[0].strategy.name == "dear")


def test_each_rank_holds_its_part_of_the_state(ours: Any) -> None:
    _, runner = fit(ours())
    held = runner.optimizers[0].held_state
    mine = sum(value.numel() for state in held.values() for name, value in state.items() if name != "step")
    total = 2 * sum(param.numel() for param in runner.lightning_module.parameters())
    assert mine < total if dear.size() > 1 else mine == total
    sums = dear.allreduce(torch.tensor(mine), op=dear.Sum)
    assert total <= int(sums) <= total + 64 * dear.size()
