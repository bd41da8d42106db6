"""The optimizer that every strategy shares: it composes the user's, and looks like it.

    backward │ hooks fill buckets, full ones are reduced while backward goes on
    step()   │ [1] reductions are awaited, nearest the input first   [2] the user's optimizer updates this rank's shard
             │ [3] all-gathers are issued; step() returns
    forward  │ each layer waits, at its gate, for its own bucket

[Note: nobody overtakes a step]
The last bucket in order of issue, whose gradients come at the very end of backward, is reduced by step() and not before.
As no update starts before that reduction is done, no rank can update anything before every rank has called step(). A rank
that calls state_dict() between two steps therefore finds the others' shares of the state at that same step. Where the
reductions were awaited earlier (clipping, synchronize()), step() begins with a barrier instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from overlap.bucket import Bucket, Phase
from overlap.clipping import clip_sharded
from overlap.communicator import ReduceOp
from overlap.elementwise import is_elementwise
from overlap.engine import Engine
from overlap.session import current
from overlap.shard_update import assemble, unhooked_step
from overlap.startup import collect_slots, synchronize_start
from overlap.state_share import StateShare
from overlap.strategy import Strategy

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps `optimizer` so that its steps use gradients averaged over all ranks.

    Args:
        optimizer: any ``torch.optim.Optimizer``; its parameter groups and state stay the ones that are used.
        model: the module that owns the parameters, or Horovod's ``named_parameters`` (pairs of name and parameter), or
            None. Without a module, the owners are found in the first iteration.
        strategy: what decides buckets and collectives.
        backward_passes_per_step: backward passes whose gradients are summed before one reduction.
        elementwise: True promises that the optimizer updates every element from that element's gradient and state
            alone, and keeps its state per parameter, so that its work may be split; None decides by its exact type.
        sync_start: take rank 0's parameters, buffers and optimizer state at construction.
        poison: fill parameters that are not gathered yet with NaN, so that a missed wait shows
            (default: environment variable ``DEAR_POISON=1``).

    On every rank. Raises ``ValueError`` where ranks, names or arguments do not fit together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None,
        strategy: Strategy,
        *,
        backward_passes_per_step: int = 1,
        elementwise: bool | None = None,
        sync_start: bool = True,
        poison: bool | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the first argument should be a torch.optim.Optimizer and is {type(optimizer).__name__}")
        if isinstance(optimizer, DistributedOptimizer):
            raise TypeError("the optimizer is distributed already")
        _check_passes(backward_passes_per_step)
        session = current()
        self._comm = session.comm
        self._optimizer = optimizer
        self._strategy = strategy
        self._model = model if isinstance(model, torch.nn.Module) else None
        named = None if isinstance(model, torch.nn.Module) or model is None else list(model)
        slots = collect_slots(optimizer, self._model, named)
        if sync_start:
            synchronize_start(self._comm, optimizer, self._model, slots)
        for name, value in vars(optimizer).items():
            if name.startswith("_optimizer_"):  # step and state_dict hooks, registered on either, run once
                setattr(self, name, value)
        self._patch_step_function()
        self._synchronized = False  # .grad holds averages: step() uses them as they are
        self._engine = Engine(
            self._comm,
            optimizer,
            self._model,
            slots,
            strategy,
            passes=backward_passes_per_step,
            sharding=strategy.sharding and (is_elementwise(optimizer) if elementwise is None else elementwise),
            poison=session.poison if poison is None else poison,
        )
        self._share = StateShare(self._comm, session.mailroom, session.register(self), self._export)

    # - Looks like the user's optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state by parameter; of sharded parameters, the part this rank holds (1-D tensors)."""
        shards = self._engine.shards
        return self._optimizer.state if shards is None else {**self._optimizer.state, **shards.state}

    def __getattr__(self, name: str) -> Any:
        # GradScaler asks for this one and would then leave unscaling to an optimizer that sees local gradients.
        if name.startswith("__") or name == "_step_supports_amp_scaling" or "_optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer[{self._strategy.name}, {self._comm.size} rank(s)] of {self._optimizer!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DistributedOptimizer holds connections and cannot be copied or pickled; use state_dict()")

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """In order of issue; empty before the first step."""
        return tuple(self._engine.order)

    @property
    def backward_passes_per_step(self) -> int:
        return self._engine.window.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step. Between steps, on every rank."""
        _check_passes(passes)
        self._engine.window.passes = passes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: they take rank 0's values, and buckets of their own in the next step. On every rank."""
        self._engine.arrive_all()
        self._optimizer.add_param_group(param_group)
        known = self._engine.slots
        new = collect_slots(self._optimizer, self._model, None, known)[len(known) :]
        synchronize_start(self._comm, self._optimizer, None, new, state=False)
        self._engine.add_slots(new)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. After a backward whose step was skipped, it completes what is in flight and forgets it."""
        if self._engine.window.touched:
            self._engine.window.discard()
            self._synchronized = False
        self._optimizer.zero_grad(set_to_none)

    # - The step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Reduce what is left, update, and start gathering the new values. On every rank.

        A closure is evaluated once by optimizers that update shards, and as often as the optimizer likes by others,
        which then get the loss averaged over ranks.
        """
        if self._engine.shards is None:
            result = self._step_whole(closure)
        else:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            self._step_shards()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers built on the inner optimizer ask
        return result

    def _prepare(self) -> None:
        if not self._synchronized:
            self._engine.prepare()

    def _close_window(self) -> None:
        self._engine.window.reset()
        self._synchronized = False

    @torch.no_grad()
    def _step_shards(self) -> None:
        engine, window = self._engine, self._engine.window
        self._prepare()
        if window.reduced:
            self._comm.barrier(label="step")  # [Note: nobody overtakes a step]
        if self._synchronized:
            self._take_synchronized()
        window.settle(engine.order[-1:])  # before anything is updated: [Note: nobody overtakes a step]
        with self._share.updating():
            whole = []
            for bucket in reversed(engine.order):
                window.settle([bucket])
                if bucket.holds_parameters:
                    bucket.adopt()
                    engine.sharded.step(bucket)
                    engine.send_parameters(bucket)
                else:
                    whole.append(bucket)
            if whole:
                self._update_whole(whole)
            self._close_window()

    def _update_whole(self, buckets: list[Bucket]) -> None:
        """Update the parameters that cannot be sliced, on every rank alike, beside sharded ones."""
        if not self._synchronized:
            self._engine.expose(buckets)
        members = {id(slot.param) for bucket in buckets for slot in bucket.slots}
        groups = self._optimizer.param_groups
        saved = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [param for param in group["params"] if id(param) in members]
            unhooked_step(self._optimizer)(self._optimizer)
        finally:
            for group, params in zip(groups, saved, strict=True):
                group["params"] = params
        for bucket in buckets:
            bucket.advance(Phase.FILLING)

    def _step_whole(self, closure: Callable[[], Any] | None) -> Any:
        step = unhooked_step(self._optimizer)
        if closure is None:
            self._reduce_whole()
            with self._share.updating():
                result = step(self._optimizer)
        else:

            def evaluate() -> Any:
                with torch.enable_grad():
                    loss = closure()
                self._reduce_whole()
                return self._average(loss)

            with self._share.updating():
                result = step(self._optimizer, evaluate)
        return result

    def _reduce_whole(self) -> None:
        self._prepare()
        engine = self._engine
        if not self._synchronized:
            engine.window.settle()
            engine.expose(engine.order)
        for bucket in engine.order:
            bucket.advance(Phase.FILLING)
        self._close_window()

    def _average(self, loss: Any) -> Any:
        plain = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), dtype=torch.float64)
        mean = plain.clone().contiguous()
        self._comm.all_reduce(mean, mean, ReduceOp.AVG, label="loss")
        return mean if isinstance(loss, torch.Tensor) else float(mean)

    # - Between backward and step, and after it

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate locally; they are reduced with the first pass outside, or by ``step()``."""
        before, self._engine.suspended = self._engine.suspended, True
        try:
            yield
        finally:
            self._engine.suspended = before

    @torch.no_grad()
    def synchronize(self) -> None:
        """After backward: ``.grad`` becomes the average over ranks and may be changed; ``step()`` uses it as it is.

        After ``step()``: parameters become final, also for those who hold them outside their modules. On every rank.
        """
        engine, window = self._engine, self._engine.window
        engine.arrive_all()
        if self._synchronized or not window.touched:
            return
        engine.prepare()
        window.settle()
        window.reduced = True
        for bucket in engine.order:
            if bucket.holds_parameters:
                self._comm.all_gather(bucket.reduced, bucket.gradients, label=f"{bucket.label} gradients")
                engine.find_unused(bucket)
        engine.expose(engine.order)
        self._synchronized = True

    def _take_synchronized(self) -> None:
        """``.grad``, as the user left it after :meth:`synchronize`, is what shards are updated with."""
        for bucket in self._engine.order:
            if bucket.holds_parameters:
                for slot in bucket.slots:
                    slot.fill()
                bucket.reduced.copy_(bucket.gradients[bucket.own])
                self._engine.sharded.take(bucket)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip by the total norm of the averaged gradients of this optimizer. On every rank, before ``step()``.

        Returns the norm before clipping, the same on every rank. Shards are clipped where they lie.
        """
        return self._clip(lambda _param: True, max_norm, norm_type, error_if_nonfinite)

    @torch.no_grad()
    def _clip(
        self, wanted: Callable[[torch.Tensor], bool], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        engine = self._engine
        if engine.shards is None or self._synchronized:  # whole averages on every rank: torch's own clipping
            self.synchronize()
            params = [slot.param for slot in engine.slots if wanted(slot.param)]
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        engine.prepare()
        engine.window.settle()
        whole = [bucket for bucket in engine.order if not bucket.holds_parameters]
        if not engine.window.reduced:
            engine.expose(whole)
        engine.window.reduced = True
        members = [slot.param for bucket in whole for slot in bucket.slots]
        alike = [param.grad for param in members if param.grad is not None and wanted(param)]
        pieces = engine.shards.gradients(wanted)
        return clip_sharded(self._comm, pieces, alike, max_norm, norm_type, error_if_nonfinite)

    # - State

    def state_dict(self) -> dict[str, Any]:
        """Plain torch format, full state, whatever the sharding. May be called on any subset of ranks, at any time."""
        if self._engine.shards is None or self._engine.learning:
            return self._optimizer.state_dict()
        state = self._optimizer.state
        whole = dict(state)
        state.update(assemble(self._engine.slots, self._share.collect()))
        try:
            return self._optimizer.state_dict()
        finally:
            state.clear()
            state.update(whole)

    def _export(self) -> Any:
        return {} if self._engine.shards is None else self._engine.shards.export()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a plain torch state dict of any world size; on every rank, with the same one."""
        self._engine.arrive_all()
        with self._share.replacing():
            self._optimizer.load_state_dict(state_dict)
            for bucket in self._engine.order:
                if bucket.holds_parameters:
                    self._engine.sharded.shard_state(bucket, self._optimizer.state)

    def finish(self) -> None:
        """Wait for parameters in transit; ``shutdown()`` calls it."""
        self._engine.arrive_all()


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step should be at least 1 and is {passes}")
