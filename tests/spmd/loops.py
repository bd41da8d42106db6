"""Training loops as scripts write them; each runs unchanged with a plain optimizer and with a distributed one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import dear
from overlap.plan.strategy import Strategy

GLOBAL_BATCH = 8
STEPS = 7

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Run:
    """One training run: alone on the whole batch (`rank` None), or one rank's part of it."""

    model: torch.nn.Module
    optimizer: Any
    rank: int | None
    size: int
    seen: list[float] = field(default_factory=list)  # has to be the same as in one process, beside the parameters

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        width = 9
        x, y = (torch.randn(GLOBAL_BATCH, width, generator=generator, dtype=torch.float64) for _ in range(2))
        if number % 3 == 1:
            x[:, 0] = -x[:, 0].abs()  # nobody takes the branch of `Sometimes`
        if number % 3 == 2:
            x[:, 0] = -x[:, 0].abs()
            x[0, 0] = 1.0  # only the first rank takes it
        if self.rank is None:
            return x, y
        share = GLOBAL_BATCH // self.size
        part = slice(self.rank * share, (self.rank + 1) * share)
        return x[part].clone(), y[part].clone()

    def loss(self, number: int) -> torch.Tensor:
        x, y = self.batch(number)
        return torch.nn.functional.mse_loss(self.model(x), y)

    def replanned(self, step: int) -> Strategy:
        """The optimizer's strategy with other limits, where it has any."""
        strategy = copy.copy(self.optimizer.strategy)
        if hasattr(strategy, "threshold_mb"):
            strategy.threshold_mb = (0.0001, 25, 0.001)[step % 3]
            strategy.num_nearby_layers = None
        if getattr(strategy, "policy", None) == "rsag":
            strategy.all_reduced = (0.5, 0.0, 0.25)[step % 3]
        return strategy

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Where parameters are looked at through the model, or replaced: `fsdp` has them then."""
        sharded = self.distributed and self.optimizer.strategy.name in ("fsdp", "osdp")
        return dear.whole(self.model) if sharded else contextlib.nullcontext()

    @property
    def distributed(self) -> bool:
        return self.rank is not None

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        if self.distributed:
            return self.optimizer.clip_grad_norm_(max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)


def plain(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


def zeros_kept(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=False)
        run.loss(step).backward()
        run.optimizer.step()


def module_zero_grad(run: Run) -> None:
    for step in range(STEPS):
        run.model.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


def scheduler(run: Run) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()
        schedule.step()


def clipped(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.seen.append(float(run.clip(0.05)))
        run.optimizer.step()


def clipped_by_largest(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        clip = dear.clip_grad_norm_ if run.distributed else torch.nn.utils.clip_grad_norm_
        run.seen.append(float(clip(run.model.parameters(), 0.01, float("inf"))))
        run.optimizer.step()


def clipped_after_synchronize(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        if run.distributed:
            run.optimizer.synchronize()
        run.seen.append(float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)))
        with run.optimizer.skip_synchronize() if run.distributed and step % 2 else contextlib.nullcontext():
            run.optimizer.step()


def closure(run: Run) -> None:
    for step in range(STEPS):
        losses = []

        def evaluate(step: int = step, losses: Any = losses) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(step)
            loss.backward()
            losses.append(loss)
            return loss

        returned = run.optimizer.step(evaluate)
        if "line_search_fn" in run.optimizer.defaults and run.distributed:  # LBFGS decides by what all ranks lose
            torch.testing.assert_close(returned, dear.allreduce(losses[0].detach()))
        else:
            assert returned is losses[0], "the rank's own"


def accumulated(run: Run) -> None:
    """Two passes per step, and an incomplete last window."""
    if run.distributed:
        run.optimizer.set_backward_passes_per_step(2)
    for first in range(0, STEPS, 2):
        run.optimizer.zero_grad()
        for step in range(first, min(first + 2, STEPS)):
            (run.loss(step) / 2).backward()
        run.optimizer.step()


def accumulated_without_sync(run: Run) -> None:
    """The first window is one pass, so that two are a surprise; the last ends before a pass outside no_sync()."""
    for inside, outside in ((None, 0), (1, 2), (3, 4), (5, None)):
        run.optimizer.zero_grad()
        if inside is not None:
            with run.optimizer.no_sync() if run.distributed else contextlib.nullcontext():
                (run.loss(inside) / 2).backward()
        if outside is not None:
            (run.loss(outside) / 2).backward()
        run.optimizer.step()


def never_zeroed(run: Run) -> None:
    for step in range(3):
        run.loss(step).backward()
        run.optimizer.step()


def skipped_steps(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        if step % 3 != 1:
            run.optimizer.step()


def skipped_steps_behind_our_back(run: Run) -> None:
    for step in range(STEPS):
        run.model.zero_grad()
        run.loss(step).backward()
        if step % 3 != 1:
            run.optimizer.step()


def skipped_where_some_used_nothing(run: Run) -> None:
    """In a step that all ranks skip, the first rank alone has gradients."""
    for step in range(STEPS):
        run.optimizer.zero_grad()
        loss = run.loss(step)
        if step % 3 != 1:
            loss.backward()
            run.optimizer.step()
        elif run.rank in (None, 0):
            loss.backward()


def evaluated_between(run: Run) -> None:
    seen = []
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()
        run.model.eval()
        with torch.no_grad():
            seen.append(float(run.model(torch.ones(2, 9, dtype=torch.float64)).real.sum()))
        run.model.train()
    assert all(value == value for value in seen)


def unfrozen_later(run: Run) -> None:
    first = next(iter(run.model.parameters()))
    first.requires_grad_(False)
    for step in range(STEPS):
        if step == 3:
            first.requires_grad_(True)
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


def frozen_later(run: Run) -> None:
    first = next(iter(run.model.parameters()))
    for step in range(STEPS):
        if step == 3:
            first.requires_grad_(False)
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


def _overflowing(run: Run, step: int) -> torch.Tensor:
    """In step 3 one element's gradient is infinite on one rank, and so in one rank's shard: nobody may step."""
    loss = run.loss(step)
    if step == 3 and run.rank in (None, 0):
        loss = loss + next(iter(run.model.parameters())).reshape(-1)[0] * float("inf")
    return loss


def scaled(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        scaler.scale(_overflowing(run, step)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.seen.append(scaler.get_scale())


def scaled_and_clipped(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        scaler.scale(_overflowing(run, step)).backward()
        scaler.unscale_(run.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        scaler.step(run.optimizer)
        scaler.update()
        run.seen += [scaler.get_scale(), 0.0 if step == 3 else float(norm)]


def scaled_as_with_horovod(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        scaler.scale(_overflowing(run, step)).backward()
        if run.distributed:
            run.optimizer.synchronize()
        scaler.unscale_(run.optimizer)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        with run.optimizer.skip_synchronize() if run.distributed else contextlib.nullcontext():
            scaler.step(run.optimizer)
        scaler.update()
        run.seen.append(scaler.get_scale())


def group_added(run: Run) -> None:
    offset = torch.nn.Parameter(torch.zeros(9, dtype=torch.float64))
    for step in range(STEPS):
        if step == 3:
            run.optimizer.add_param_group({"params": [offset], "lr": 0.03})
        run.optimizer.zero_grad()
        x, y = run.batch(step)
        torch.nn.functional.mse_loss(run.model(x) + offset, y).backward()
        run.optimizer.step()
        if run.distributed:
            run.optimizer.synchronize()  # the parameter lives outside every module
    run.model.register_parameter("offset", offset)


def replanned(run: Run) -> None:
    """Other buckets after every step, also before the first and after parameters came late."""
    first = next(iter(run.model.parameters()))
    first.requires_grad_(False)
    for step in range(STEPS):
        if run.distributed:
            run.optimizer.replan(run.replanned(step))
        if step == 2:
            first.requires_grad_(True)
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()
        if run.rank == 0:
            run.optimizer.state_dict()  # asks the others, who may be in the next replan already


def state_reloaded(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()
        if step == 3:
            run.optimizer.load_state_dict(run.optimizer.state_dict())


def data_replaced(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()
        if step == 2:
            with run.whole():
                vector = torch.nn.utils.parameters_to_vector(run.model.parameters())
                torch.nn.utils.vector_to_parameters(vector * 0.5, run.model.parameters())


LOOPS = {
    loop.__name__: loop
    for loop in (
        plain,
        zeros_kept,
        module_zero_grad,
        scheduler,
        clipped,
        clipped_by_largest,
        clipped_after_synchronize,
        closure,
        accumulated,
        accumulated_without_sync,
        never_zeroed,
        skipped_steps,
        skipped_steps_behind_our_back,
        skipped_where_some_used_nothing,
        evaluated_between,
        unfrozen_later,
        frozen_later,
        scaled,
        scaled_and_clipped,
        scaled_as_with_horovod,
        group_added,
        replanned,
        state_reloaded,
        data_replaced,
    )
}
