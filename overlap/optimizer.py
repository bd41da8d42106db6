"""The optimizer that every strategy shares: it composes the user's, and looks like it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from overlap.averages import Averages
from overlap.bucket import Bucket
from overlap.communicator import ReduceOp
from overlap.elementwise import is_elementwise
from overlap.engine import Engine
from overlap.exchange import Exchange
from overlap.grouping import parse_groups
from overlap.horovod.compression import NoneCompressor
from overlap.horovod.process_set import ProcessSet, global_process_set
from overlap.loss_scale import is_scaler_step, is_unscaling
from overlap.master import check_gather_dtype, numbered, taken, unnumbered
from overlap.membership import membership
from overlap.session import current
from overlap.shard_update import PieceState, assemble
from overlap.startup import collect_slots, synchronize_start
from overlap.state_share import StateShare
from overlap.stepper import Stepper
from overlap.strategy import Plan, Strategy

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps `optimizer` so that its steps use gradients averaged over all ranks.

    Args:
        optimizer: any ``torch.optim.Optimizer``; its parameter groups and state stay the ones that are used.
        named_parameters: the module that owns the parameters, or pairs of name and parameter, or None. Without a
            module, the owners are found in the first iteration.
        strategy: what decides buckets and collectives.
        compression: what gradients become on the wire: ``Compression.none``, ``.fp16``, ``.bf16`` (summed in fp32,
            rounded once) or a class with ``compress`` and ``decompress``, whose gradients are reduced whole.
            Parameters travel in their own type, unless the strategy has a `gather_dtype`.
        backward_passes_per_step: backward passes whose gradients are summed before one reduction.
        op: ``Average`` or ``Sum`` over the ranks.
        gradient_predivide_factor: f divides by f before the sum and by size / f after it.
        num_groups: as a number in `groups`.
        groups: how many buckets, of neighbours in the order of arrival, or a list of lists of parameters that share a
            bucket; the strategy decides about parameters that are in none. Tensors of several types need several.
        sparse_as_dense: turn sparse gradients into dense ones; otherwise their rows are gathered, and every rank updates
            those parameters in full.
        process_set: the ranks among which gradients are reduced. Other sets than the global one: on every rank of the
            job, each with its own; a rank outside of the set it gives trains alone.
        elementwise: True promises that the optimizer updates every element from that element's gradient and state
            alone, and keeps its state per parameter, so that its work may be split; None decides by its exact type.
        sync_start: take rank 0's parameters, buffers and optimizer state at construction.
        poison: fill parameters that are not gathered yet with NaN, so that a missed wait shows
            (default: environment variable ``DEAR_POISON=1``).

    On every rank. Raises ``ValueError`` or ``TypeError`` where ranks, names or arguments do not fit together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None,
        strategy: Strategy,
        *,
        compression: Any = NoneCompressor,
        backward_passes_per_step: int = 1,
        op: ReduceOp = ReduceOp.AVG,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
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
        sliceable = is_elementwise(optimizer) if elementwise is None else elementwise
        sharding = strategy.sharding and sliceable
        members = membership(session, process_set, sharding=sharding)
        self._comm = members.comm
        self._optimizer = optimizer
        exchange = Exchange(compression, op, gradient_predivide_factor, self._comm.size)
        self._model = named_parameters if isinstance(named_parameters, torch.nn.Module) else None
        named = None
        if not (isinstance(named_parameters, torch.nn.Module) or named_parameters is None):
            named = list(named_parameters)
        slots = collect_slots(optimizer, self._model, named)
        chosen = parse_groups(num_groups, groups, slots)
        if sync_start:
            synchronize_start(self._comm, optimizer, self._model, slots)
        for name, value in vars(optimizer).items():
            if name.startswith("_optimizer_"):  # step and state_dict hooks, registered on either, run once
                setattr(self, name, value)
        self._patch_step_function()
        if strategy.eager and not sliceable:
            raise ValueError(
                f"eager=True needs an optimizer that works element by element; {type(optimizer).__name__} is not known to "
                "(elementwise=True promises that it does)"
            )
        if strategy.eager and not exchange.slices:
            raise ValueError(
                f"eager=True updates shards, and {compression!r} gives whole tensors; use Compression.fp16"
            )
        check_gather_dtype(
            strategy.gather_dtype,
            ((slot.name, slot.param) for slot in slots),
            optimizer,
            sharding=sharding and exchange.slices,
        )
        self._engine = Engine(
            self._comm,
            members.gathers,
            optimizer,
            self._model,
            slots,
            strategy,
            exchange,
            groups=chosen,
            sparse_as_dense=sparse_as_dense,
            passes=backward_passes_per_step,
            sharding=sharding and exchange.slices,
            deferring=strategy.deferred and sliceable,
            poison=session.poison if poison is None else poison,
        )
        session.channels.hold((members.comm, members.gathers), self._engine)  # which lives as long as its hooks do
        others = [rank for rank in members.ranks if rank != session.comm.rank]
        self._share = StateShare(others, session.mailroom, session.register(self), partial(_share_of, self._engine))
        self._engine.changing = self._share.updating
        if self._engine.eager is not None:
            self._engine.eager.locked = self._share.replacing
        self._averages = Averages(self._engine)
        self._stepper = Stepper(self._engine, self._averages, optimizer, self._share)
        self._inside_skip_synchronize = False

    # - Looks like the user's optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        if is_unscaling(sys._getframe(1)) and not self._averages.infinities_shown:
            self._averages.synchronize()  # [Note: one verdict on infinities]
        return self._optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state by parameter; of sharded parameters, the part this rank holds (1-D tensors)."""
        shards = self._engine.shards
        if self._engine.deferred is not None:
            self._engine.transit.arrive_all()
        return self._optimizer.state if shards is None else {**self._optimizer.state, **shards.state}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        if is_scaler_step(sys._getframe(1)):
            self._averages.reveal_infinities()  # [Note: one verdict on infinities]
        return True

    def __repr__(self) -> str:
        return f"DistributedOptimizer[{self._engine.strategy.name}, {self._comm.size} rank(s)] of {self._optimizer!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DistributedOptimizer holds connections and cannot be copied or pickled; use state_dict()")

    @property
    def strategy(self) -> Strategy:
        """What decides the buckets; :meth:`replan` replaces it."""
        return self._engine.strategy

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

    def replan(self, strategy: Strategy) -> None:
        """Go on with other buckets: `strategy`'s. Parameters and state stay what they are, bit for bit.

        On every rank with the same `strategy`, between ``step()`` and the next backward.
        """
        self._engine.replan(strategy)

    def preview(self, strategy: Strategy) -> Plan:
        """The buckets that :meth:`replan` would make. After the first step, on any rank."""
        return self._engine.preview(strategy)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: they take rank 0's values, and buckets of their own in the next step. On every rank."""
        self._averages.refuse("add_param_group()")
        self._engine.transit.arrive_all()
        self._optimizer.add_param_group(param_group)
        known = self._engine.slots
        new = collect_slots(self._optimizer, self._model, None, known)[len(known) :]
        synchronize_start(self._comm, self._optimizer, None, new, state=False)
        self._engine.add_slots(new)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. After a backward whose step was skipped, it completes what is in flight and forgets it."""
        self._stepper.forget()
        if self._engine.deferred is not None and not set_to_none:
            self._engine.transit.arrive_all()  # zeros would be written into what is still being reduced
        self._optimizer.zero_grad(set_to_none)

    # - The step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Reduce what is left, update, and start gathering the new values. On every rank.

        A closure is evaluated once by optimizers that update shards, and as often as the optimizer likes by others,
        which then get the loss averaged over ranks.
        """
        if self._inside_skip_synchronize and self._engine.window.touched and not self._averages.synchronized:
            raise RuntimeError("inside skip_synchronize() the gradients are local still: call synchronize() before it")
        # A GradScaler leaves its scale here (None where it has unscaled) and what it found.
        found_inf, scale = vars(self).get("found_inf"), vars(self).get("grad_scale")
        if found_inf is not None and found_inf > 0:
            self._stepper.forget(everywhere=True)
            return None
        result = self._stepper.step(closure, scale)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers built on the inner optimizer ask
        return result

    # - Between backward and step, and after it

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate locally; they are reduced with the first pass outside, or by ``step()``."""
        before, self._engine.suspended = self._engine.suspended, True
        try:
            yield
        finally:
            self._engine.suspended = before

    def synchronize(self) -> None:
        """After backward: ``.grad`` becomes the average over ranks and may be changed; ``step()`` uses it as it is.

        After ``step()``: parameters become final, also for those who hold them outside their modules. On every rank.
        """
        self._averages.refuse("synchronize()")  # before any wait: others may issue their all-gathers in step() only
        self._engine.transit.arrive_all()
        if self._engine.window.touched:
            self._averages.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Horovod's: ``step()`` inside uses the gradients as they are after ``synchronize()``, which has to be called.

        ``step()`` does so without it, too. Raises ``RuntimeError`` in ``step()`` if the gradients are local still.
        """
        self._inside_skip_synchronize = True
        try:
            yield
        finally:
            self._inside_skip_synchronize = False

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip by the total norm of the averaged gradients of this optimizer. On every rank, before ``step()``.

        Returns the norm before clipping, the same on every rank. Shards are clipped where they lie.
        """
        return self._averages.clip(lambda _param: True, max_norm, norm_type, error_if_nonfinite)

    def _clip(
        self, wanted: Callable[[torch.Tensor], bool], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        return self._averages.clip(wanted, max_norm, norm_type, error_if_nonfinite)

    # - State

    def state_dict(self) -> dict[str, Any]:
        """Plain torch format, full state, whatever the sharding. May be called on any subset of ranks, at any time.

        With a `gather_dtype`, ``["master"]`` beside the state holds exact parameters by number, where they are known.
        """
        self._averages.refuse("state_dict()")
        if self._engine.deferred is not None:
            self._engine.transit.arrive_all()
        if self._engine.shards is None:
            return self._optimizer.state_dict()
        full: dict[torch.Tensor, dict[str, Any]] = {}
        if not self._engine.learning:
            full = assemble(self._engine.slots, self._share.collect())
        masters = {**self._engine.shards.loaded, **taken(full)}
        state = self._optimizer.state
        whole = dict(state)
        state.update(full)
        try:
            saved = self._optimizer.state_dict()
        finally:
            state.clear()
            state.update(whole)
        if self._engine.strategy.gather_dtype is not None:
            saved["master"] = numbered(self._optimizer, masters)
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a plain torch state dict of any world size; on every rank, with the same one.

        With a `gather_dtype`, exact parameters come from ``state_dict["master"]`` where the model's, loaded before or
        after, are those rounded; elsewhere the model's count. Without one, the model's count everywhere.
        """
        self._averages.refuse("load_state_dict()")
        self._engine.transit.arrive_all()
        rounding = self._engine.strategy.gather_dtype is not None
        masters = unnumbered(self._optimizer, state_dict.get("master", {})) if rounding else {}
        with self._share.replacing():
            self._optimizer.load_state_dict(state_dict)
            for bucket in self._engine.order:
                if bucket.holds_parameters:
                    self._engine.sharded.shard_state(bucket, self._optimizer.state)
            if rounding:
                self._engine.sharded.load_masters(masters)

    def finish(self) -> None:
        """Wait for parameters in transit; ``shutdown()`` calls it."""
        self._stepper.finish()


def _share_of(engine: Engine) -> PieceState:
    """This rank's part of the state. Not of the optimizer, which would then live as long as others may ask for it."""
    return {} if engine.shards is None else engine.shards.export()


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step should be at least 1 and is {passes}")
