"""Ranks that run out of data call join(): the others' training equals one process on the data that is there."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dear
from tests.spmd.loops import GLOBAL_BATCH, Run
from tests.spmd.models import MODELS, SPARSE_MODELS, double_model
from tests.spmd.strategies import OPTIMIZERS as KNOWN
from tests.spmd.training import assert_close
from tests.spmd.uneven_training import WRAP, backward_of, two_runs

pytestmark = pytest.mark.four_ranks


class _Unknown(torch.optim.SGD):
    """May decide by what its closure returns, for all we know."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


OPTIMIZERS = KNOWN | {"unknown": lambda p: _Unknown(p, 0.05, momentum=0.9)}
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def _none_on_rank_0(rank: int, steps: int) -> int:
    return 0 if rank == 0 and dear.size() > 1 else steps


def _fewer_on_higher(rank: int, steps: int) -> int:
    return steps - min(rank, 3)


def _fewer_on_lower(rank: int, steps: int) -> int:
    return steps - min(dear.size() - 1 - rank, 3)


def _batches(run: Run, first: int, steps: int, amount: Callable[[int, int], int]) -> Batches:
    """This rank's batches, `amount(rank, steps)` of them; in one process, in each step what all ranks have."""
    share = GLOBAL_BATCH // run.size
    for step in range(steps):
        present = [rank for rank in range(run.size) if step < amount(rank, steps)]
        if run.rank is None:
            x, y = run.batch(first + step)
            rows = [row for rank in present for row in range(rank * share, (rank + 1) * share)]
            yield x[rows], y[rows]
        elif run.rank in present:
            yield run.batch(first + step)


def _join(run: Run) -> None:
    if run.distributed:
        assert 0 <= dear.join() < dear.size()


def stepped(run: Run) -> None:
    """Rank 0 has nothing in the first iteration; then ranks run out one after the other, while the rate changes."""
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
    last = 0
    for amount, steps in ((_none_on_rank_0, 2), (_fewer_on_higher, 4), (_fewer_on_lower, 4)):
        for batch in _batches(run, last, steps, amount):
            run.optimizer.zero_grad()
            backward_of(run, batch)
            run.optimizer.step()
            schedule.step()
            if run.rank in (0, None) and amount is _fewer_on_higher:
                run.optimizer.state_dict()  # of all ranks' shards, while some have joined
        last += steps
        _join(run)
        if run.distributed:
            schedule.last_epoch = last  # has missed some, while the rate itself is the others'


def clipped_and_skipped(run: Run) -> None:
    for step, batch in enumerate(_batches(run, 0, 6, _fewer_on_higher)):
        run.optimizer.zero_grad()
        backward_of(run, batch)
        if step % 2:
            run.clip(0.05)
        if step % 3 != 1:
            run.optimizer.step()
    if run.distributed:
        run.optimizer.zero_grad()
    _join(run)


def skipped_behind_our_back(run: Run) -> None:
    for step, batch in enumerate(_batches(run, 0, 7, _fewer_on_lower)):
        run.model.zero_grad()
        backward_of(run, batch)
        if step % 3 != 2:
            run.optimizer.step()
    if run.distributed:
        run.optimizer.zero_grad()  # the last step may have been skipped
    _join(run)


def changed_after_synchronize(run: Run) -> None:
    for batch in _batches(run, 0, 5, _fewer_on_lower):
        run.optimizer.zero_grad()
        backward_of(run, batch)
        if run.distributed:
            run.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        run.optimizer.step()
    _join(run)


def replaced_after_synchronize(run: Run) -> None:
    for batch in _batches(run, 0, 5, _fewer_on_lower):
        run.optimizer.zero_grad()
        backward_of(run, batch)
        if run.distributed:
            run.optimizer.synchronize()
        for param in run.model.parameters():
            assert param.grad is not None
            param.grad = param.grad * 2.0 + 0.1
        run.optimizer.step()
    _join(run)


def scaled(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step, batch in enumerate(_batches(run, 0, 7, _fewer_on_higher)):
        run.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(run.model(batch[0]), batch[1]) * (float("inf") if step == 4 else 1.0)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(run.optimizer)
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        scaler.step(run.optimizer)
        scaler.update()
    _join(run)


def accumulated(run: Run) -> None:
    """Windows of two passes, then one under no_sync(); nobody's data ends inside a window."""
    if run.distributed:
        run.optimizer.set_backward_passes_per_step(2)
    batches = list(_batches(run, 0, 4, _fewer_on_higher))
    for batch in batches:
        run.optimizer.zero_grad()
        for part in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            backward_of(run, part, 0.5)  # type: ignore[arg-type]
        run.optimizer.step()
    _join(run)
    if run.distributed:
        run.optimizer.set_backward_passes_per_step(1)
    for batch in _batches(run, 4, 4, _fewer_on_lower):
        run.optimizer.zero_grad()
        if run.distributed:
            with run.optimizer.no_sync():
                backward_of(run, batch, 0.5)
        else:
            backward_of(run, batch, 0.5)
        backward_of(run, batch, 0.5)
        run.optimizer.step()
    _join(run)


def closures(run: Run) -> None:
    for batch in _batches(run, 0, 5, _fewer_on_lower):

        def evaluate(batch: Any = batch) -> torch.Tensor:
            run.optimizer.zero_grad()
            return backward_of(run, batch)

        run.optimizer.step(evaluate)
    _join(run)


def unfrozen(run: Run) -> None:
    first = next(iter(run.model.parameters()))
    first.requires_grad_(False)
    for first_batch, steps, amount in ((0, 6, _fewer_on_higher), (6, 2, _fewer_on_lower)):
        for step, batch in enumerate(_batches(run, first_batch, steps, amount)):
            if step == 5:  # at several ranks, others have joined, and have it thawed when they go on
                first.requires_grad_(True)
            run.optimizer.zero_grad()
            backward_of(run, batch)
            run.optimizer.step()
        _join(run)


LOOPS = {
    loop.__name__: loop
    for loop in (
        stepped,
        clipped_and_skipped,
        skipped_behind_our_back,
        changed_after_synchronize,
        replaced_after_synchronize,
        scaled,
        accumulated,
        closures,
        unfrozen,
    )
}
#: What early updates refuse with or without join().
NOT_EAGER = {"clipped_and_skipped", "scaled"}
ROWS = [
    *(
        (loop, strategy, "sgd")
        for loop in ("stepped", "clipped_and_skipped", "scaled")
        for strategy in WRAP
        if not (strategy == "dear-eager" and loop in NOT_EAGER)
    ),
    *(
        (loop, strategy, "sgd")
        for loop in ("changed_after_synchronize", "replaced_after_synchronize", "accumulated", "closures", "unfrozen")
        for strategy in ("dear", "wfbp", "bytescheduler")
    ),
    *(("stepped", strategy, "adafactor") for strategy in ("dear", "oss", "bytescheduler")),
    ("unfrozen", "oss", "sgd"),
    ("stepped", "dear", "adamw"),
    ("closures", "dear", "unknown"),
]


@functools.cache
def _alone(model_name: str, optimizer_name: str, loop: str) -> Any:
    return _train(model_name, optimizer_name, loop, None)


def _train(model_name: str, optimizer_name: str, loop: str, strategy: str | None) -> Any:
    torch.manual_seed(5)
    model = double_model(model_name) if model_name in MODELS else SPARSE_MODELS[model_name]().double()
    optimizer: Any = OPTIMIZERS[optimizer_name](list(model.parameters()))
    run = Run(model, optimizer, None, dear.size())
    if strategy is not None:
        run.optimizer, run.rank = WRAP[strategy](optimizer, model), dear.rank()
    LOOPS[loop](run)
    if strategy is not None:
        run.optimizer.synchronize()
    return model.state_dict(), run.optimizer.state_dict(), run.seen


def _check(model: str, optimizer: str, loop: str, strategy: str) -> None:
    expected, actual = _alone(model, optimizer, loop), _train(model, optimizer, loop, strategy)
    for mine, theirs, where in zip(actual, expected, ("model", "optimizer", "seen"), strict=True):
        assert_close(mine, theirs, where)


@pytest.mark.parametrize(("loop", "strategy", "optimizer"), ROWS)
def test_uneven_data(loop: str, strategy: str, optimizer: str) -> None:
    _check("Sometimes" if loop == "stepped" else "Mlp", optimizer, loop, strategy)


def test_what_was_said_about_an_optimizer_that_some_ranks_have_dropped_is_old() -> None:
    model = double_model("Mlp")
    run = Run(
        model, dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model), dear.rank(), dear.size()
    )
    for step in range(3):
        run.optimizer.zero_grad()
        backward_of(run, run.batch(step))
        run.optimizer.step()
    if dear.rank() > 0:
        del run, model
        gc.collect()
    assert 0 <= dear.join() < dear.size()


@pytest.mark.parametrize("strategy", ["dear", "dear-rb", "bytescheduler"])
def test_uneven_data_with_sparse_gradients(strategy: str) -> None:
    for loop in ("stepped", "skipped_behind_our_back"):
        _check("Tables", "adagrad", loop, strategy)


def _alternate(strategy: str) -> list[Any]:
    """Two optimizers whose rounds overlap: each is clipped before the first one steps; one steps every other time."""
    runs = two_runs(strategy)
    for step, batches in enumerate(zip(*(_batches(run, 0, 5, _fewer_on_higher) for run in runs), strict=True)):
        for run, batch in zip(runs, batches, strict=True):
            run.optimizer.zero_grad()
            backward_of(run, batch)
        for run in runs:
            run.clip(0.5)
        for number, run in enumerate(reversed(runs)):
            if number or step % 2:
                run.optimizer.step()
    for run in runs:
        if strategy:
            run.optimizer.zero_grad()
    _join(runs[0])
    return [run.model.state_dict() for run in runs]


@pytest.mark.parametrize("strategy", ["dear", "mgwfbp", "bytescheduler"])
def test_joined_ranks_follow_several_optimizers(strategy: str) -> None:
    assert_close(_alternate(strategy), _alternate(""), "models")
