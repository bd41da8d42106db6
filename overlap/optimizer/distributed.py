"""``DistributedOptimizer``, which every strategy uses: it wraps the user's optimizer and looks like it."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from overlap.core.alike import NOTHING, Clipped
from overlap.core.bucket import Bucket
from overlap.core.gates.compiled import keep_untraced
from overlap.core.round import Stage
from overlap.core.unsharding import Unsharder
from overlap.features.clipping import clip, norm_of, scale
from overlap.features.join import joined_ranks_of
from overlap.features.join_follower import Follower
from overlap.features.loss_scale import is_scaler_step, is_unscaling, reveal_along_axes, reveal_infinities, scale_of
from overlap.job.groups import Membership
from overlap.job.session import Session, current
from overlap.optimizer.arguments import SharedArguments, check_passes
from overlap.optimizer.assembly import build
from overlap.optimizer.explain import NO_PLAN
from overlap.optimizer.layer_times import ProfileWriter, measurable
from overlap.optimizer.moments import may_add
from overlap.optimizer.own_methods import guarded
from overlap.optimizer.start import collect_slots, synchronize_start
from overlap.plan.plan import Plan
from overlap.plan.strategy import Strategy
from overlap.state.live_state import held_state, replace_state, state_of
from overlap.trace.picture import Row, draw_rows

__all__ = ["DistributedOptimizer", "Planned", "Study"]


class Study(Protocol):
    """Measures steps, and changes the buckets once it has measured enough; called after each step."""

    @property
    def under_way(self) -> bool: ...

    def __call__(self, optimizer: DistributedOptimizer, args: Any, kwargs: Any, /) -> None: ...


class Planned(Protocol):
    """A planner that has made a plan by itself."""

    def explain(self, optimizer: DistributedOptimizer, /) -> str: ...
    def rows(self, optimizer: DistributedOptimizer, /) -> list[Row]: ...


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps `optimizer` so that its steps use gradients averaged over all ranks.

    Args:
        optimizer: any ``torch.optim.Optimizer``; its parameter groups and state stay the ones that are used.
        named_parameters: the module that owns the parameters, or pairs of name and parameter, or None. Without a
            module, the owners are found in the first iteration.
        strategy: what decides buckets and collectives.
        arguments: those that every strategy takes.
        groups_of: among which ranks gradients are averaged, where that is not `arguments.process_set`; called once, on
            every rank.
        beside: an optimizer of the same model and the same ranks, with which this one shares the passes in which
            parameters are gathered.

    On every rank. Raises ``ValueError`` or ``TypeError`` where ranks, names or arguments do not fit together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None,
        strategy: Strategy,
        arguments: SharedArguments,
        *,
        groups_of: Callable[[Session], Membership] | None = None,
        beside: DistributedOptimizer | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the first argument should be a torch.optim.Optimizer and is {type(optimizer).__name__}")
        if isinstance(optimizer, DistributedOptimizer):
            raise TypeError("the optimizer is distributed already: use it as it is, or wrap the optimizer inside")
        passes = None if beside is None else beside._passes
        parts = build(
            current(),
            self,
            optimizer,
            named_parameters,
            strategy,
            arguments,
            groups_of=groups_of,
            passes=passes,
        )
        # Not `_optimizer`: Lightning's wrappers, which pose as this class, have this object under that name.
        self._inner, self._model, self._comm = optimizer, parts.model, parts.comm
        self._engine, self._averages, self._everyone = parts.engine, parts.averages, parts.everyone
        self._stepper, self._full_state, self._wrapped = parts.stepper, parts.full_state, parts.wrapped
        for name, value in vars(optimizer).items():
            if name.startswith("_optimizer_"):  # step and state_dict hooks, registered on either, run once
                setattr(self, name, value)
        self._patch_step_function()
        keep_untraced(type(self), "step", "zero_grad")
        self._replanning = parts.replanning
        self._studies: list[Study] = []
        self._planned: Planned | None = None
        self._inside_skip_synchronize = False
        step = weakref.WeakMethod(self._step_as_told)
        self._follower = Follower(self._engine, parts.rounds, self._averages, self._stepper, optimizer, step)
        joined_ranks_of(current()).enroll(self._follower)

    @property
    def _passes(self) -> Unsharder:
        return self._engine.unsharder

    # - Looks like the user's optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        if is_unscaling(sys._getframe(1)) and self._averages.stage is not Stage.SHOWN:
            self._averages.synchronize()  # [Note: one verdict on infinities]
            reveal_along_axes(self._averages)
            self._engine.closing.scale = scale_of(sys._getframe(1))
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._engine.transit.arrive_all()
        self._inner.param_groups = groups
        self._wrapped.guard()

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state by parameter, whole. Of sharded ones a copy: read on any rank, written on every one."""
        self._engine.policy.arrive()
        return state_of(self._inner, self._engine.shards, self._full_state.rows)

    @state.setter
    def state(self, state: Any) -> None:
        self._engine.transit.arrive_all()
        replace_state(self._inner, self._engine.shards, self._full_state.rows, state)

    @property
    def held_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The part of ``state`` that this rank holds; slices of parameters have 1-D tensors."""
        return held_state(self._inner, self._engine.shards)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(name)
        return guarded(self._inner, name, lambda: self._wrapped.local)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        if is_scaler_step(sys._getframe(1)):
            reveal_infinities(self._averages)  # [Note: one verdict on infinities]
            return True
        return getattr(self._inner, "_step_supports_amp_scaling", False)  # others may unscale before they clip

    def __repr__(self) -> str:
        return f"DistributedOptimizer[{self._engine.strategy.name}, {self._everyone.size} rank(s)] of {self._inner!r}"

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
    def tuning(self) -> bool:
        """Whether steps are still measured for other buckets, by ``tune`` or for mgwfbp's plan. The same on every rank."""
        return any(study.under_way for study in self._studies)

    @property
    def decides_by_loss(self) -> bool:
        """Whether ``step(closure)`` may evaluate the closure several times, by its loss averaged over ranks."""
        return self._stepper.decides_by_loss

    def explain(self) -> str:
        """Explain why buckets are as they are: measurements, plan, what is not hidden, and what would help by how much.

        On any rank, after the plan was made (``tuning`` is false). Raises ``RuntimeError`` before, and where the script
        has chosen the buckets itself.
        """
        return self._made_plan.explain(self)

    def draw_plan(self, path: str | os.PathLike[str]) -> None:
        """Write a PNG of two steps as the plan's simulation has them. As :meth:`explain`; needs matplotlib."""
        draw_rows(self._made_plan.rows(self), os.fspath(path))

    @property
    def _made_plan(self) -> Planned:
        if self._planned is None:
            raise RuntimeError(NO_PLAN)
        return self._planned

    def save_profile(self, path: str | os.PathLike[str], *, steps: int = 10, batch_size: int = 1) -> None:
        """Measure how long each layer takes in `steps` steps, after one more, and write it to `path`, for
        ``python -m dear.predict --profile``. Training goes on meanwhile.

        Args:
            path: a JSON file, which appears when the steps are over.
            steps: whose medians count. Of several backward passes in a step the last one counts.
            batch_size: samples of a rank in one pass; where it is not given, a batch counts as a sample.

        On rank 0, between steps; on other ranks it does nothing. Raises ``ValueError`` where the optimizer was given
        parameters and no module, for parameters on a GPU, and for counts below 1.
        """
        model = measurable(self._model, steps, batch_size)
        if self._everyone.rank == 0:
            writer = ProfileWriter(model, Path(path), steps, batch_size)
            writer.handle = self.register_step_post_hook(writer)

    def _study(self, study: Study) -> None:
        """Call `study` after each step from the next one on."""
        self._studies.append(study)
        self.register_step_post_hook(study)  # type: ignore[arg-type]

    # - Names of Horovod's own that its scripts use

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        return {slot.param: slot.name for slot in self._engine.slots}

    @property
    def _requires_update(self) -> set[torch.nn.Parameter]:
        """Those whose gradients are averaged, as they are now; Horovod's set is of when the optimizer was made."""
        return {slot.param for slot in self._engine.slots if slot.param.requires_grad}

    @property
    def backward_passes_per_step(self) -> int:
        return self._engine.round.passes

    def wraps(self, optimizer: object) -> bool:
        """Whether `optimizer` is the one that was given to this one."""
        return optimizer is self._inner

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step. Between steps, on every rank."""
        check_passes(passes)
        self._engine.round.passes = passes

    def replan(self, strategy: Strategy) -> None:
        """Go on with the buckets of another `strategy`. Parameters and state stay what they are, bit for bit.

        On every rank with the same `strategy`, between ``step()`` and the next backward. Raises on every rank where some
        rank has gradients, ``RuntimeError``, and ``ValueError`` for a strategy that updates or gathers in another way.
        """
        self._engine.closing.meet("replan()", partial(self._engine.arrangement.may_replan, strategy))
        self._replan(strategy)

    def _replan(self, strategy: Strategy) -> None:
        """:meth:`replan` after a step, in which joined ranks take part."""
        self._engine.arrangement.replan(strategy)

    def preview(self, strategy: Strategy) -> Plan:
        """The buckets that :meth:`replan` would make. After the first step, on any rank."""
        return self._engine.arrangement.preview(strategy)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: they take rank 0's values, and buckets of their own in the next step. On every rank.

        Raises ``RuntimeError`` on every rank between what averages gradients (``synchronize()``, clipping) and ``step()``.
        """
        self._engine.closing.meet("add_param_group()", partial(may_add, self._engine))
        self._engine.transit.arrive_all()
        self._inner.add_param_group(param_group)
        known = self._engine.slots
        new = collect_slots(self._inner, self._model, None, known)[len(known) :]
        synchronize_start(self._everyone, self._inner, None, new, state=False)
        self._engine.add_slots(new)
        if self._engine.unsharder.active:
            self._full_state.parameters.attach(self._engine.modules, self._engine.slots)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as in torch.

        After a backward whose step was skipped, it completes what is in flight and forgets it.
        """
        self._engine.zero_grad(zeros=not set_to_none)
        if not set_to_none:
            self._engine.policy.arrive()  # zeros would be written into what is still being reduced
        zeros = not set_to_none
        stands_in = self._engine.unsharder.active or self._engine.on_host
        aside = self._engine.sent_aside(zeros=zeros) if stands_in else contextlib.nullcontext()
        with self._wrapped.unwatched(), aside:
            self._inner.zero_grad(set_to_none)

    # - The step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Reduce what is left, update, and start gathering the new values. On every rank.

        A closure is evaluated once, and what it returned on this rank is returned, its own loss, as by DDP and Horovod.
        LBFGS, and optimizers of types that we do not know unless they were promised to work on parts, may decide by the
        loss: they evaluate as often as they like, get the loss averaged over ranks, and what they return is returned.
        """
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """:meth:`step` without the hooks that torch puts around it."""
        # A GradScaler leaves its scale here (None where it has unscaled) and what it found.
        found_inf, scale = vars(self).get("found_inf"), vars(self).get("grad_scale")
        if self._engine.round.hidden:
            self._engine.round.show_hidden()
        if found_inf is not None and found_inf > 0:
            self._engine.participants.announce("infinite")
            self._engine.closing.drop_everywhere()
            return None
        if scale is not None:
            self._engine.closing.scale = scale
        self._wrapped.follow(in_parts=self._engine.shards is not None or self._engine.policy.defers)
        self._wrapped.stepping = True
        try:
            result = self._stepper.step(closure, scale, self._check_synchronized)
        finally:
            self._wrapped.stepping = False
        self._inner._opt_called = True  # type: ignore[attr-defined]  # schedulers built on the inner optimizer ask
        return result

    def _check_synchronized(self) -> None:
        if self._inside_skip_synchronize and self._wrapped.local:
            raise RuntimeError("inside skip_synchronize() the gradients are local still: call synchronize() before it")

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
        """After backward, make ``.grad`` the average over ranks; it may be changed, and ``step()`` uses it as it is.

        After ``step()``: parameters become final, also for those who hold them outside their modules. On every rank, those
        too that had no batch: which of the two it is, they find out together.
        """
        local = self._has_local_gradients(
            "synchronize()"
        )  # and first: others may issue their all-gathers in step() only
        self._engine.transit.arrive_all()
        if local:
            self._averages.synchronize()

    def _has_local_gradients(self, call: str, clipped: Clipped = NOTHING) -> bool:
        """Whether any rank has gradients that no step has used and that are not averages in ``.grad``. On every rank, which
        all raise where what they are `clipped` by is not alike: in the next call if they are averages."""
        if self._averages.stage is Stage.SYNCHRONIZED:
            self._engine.closing.clip(clipped)
            return False
        return self._engine.ask(call, clipped)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context of Horovod's: ``step()`` inside uses the gradients as they are after ``synchronize()``.

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
        return clip(self._averages, lambda _param: True, max_norm, norm_type, error_if_nonfinite)

    def _clip(
        self, wanted: Callable[[torch.Tensor], bool], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        return clip(self._averages, wanted, max_norm, norm_type, error_if_nonfinite)

    @property
    def _in_shards(self) -> bool:
        return not self._averages.whole

    def _norm(self, wanted: Callable[[torch.Tensor], bool], norm_type: float) -> torch.Tensor:
        return norm_of(self._averages, wanted, norm_type)

    def _scale(self, wanted: Callable[[torch.Tensor], bool], factor: float) -> None:
        scale(self._averages, wanted, factor)

    # - While others have data

    def _step_as_told(self, scale: torch.Tensor | None, infinite: bool, closure: Callable[[], Any] | None) -> None:
        """What a GradScaler calls; see `overlap.features.join_follower`."""
        self.grad_scale, self.found_inf = scale, float(infinite)
        try:
            self.step(closure)
        finally:
            del self.grad_scale, self.found_inf

    # - State

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's plain format, whatever the sharding.

        May be called on any subset of ranks, at any time. With a `gather_dtype`, ``["master"]`` beside the state holds
        exact parameters by number, where they are known.
        """
        self._engine.policy.refuse("state_dict()")
        self._engine.policy.arrive()
        return self._full_state.collect()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a plain torch state dict of any world size; on every rank, with the same one.

        With a `gather_dtype`, exact parameters come from ``state_dict["master"]`` where the model's, loaded before or
        after, are those rounded; elsewhere the model's count. Without one, the model's count everywhere.
        """
        self._engine.policy.refuse("load_state_dict()")
        self._engine.participants.refuse("load_state_dict()")
        self._engine.transit.arrive_all()
        self._full_state.load(state_dict)

    def finish(self, given_up: Collection[str] = ()) -> None:
        """Wait for what is in flight. For ``shutdown()``; on communicators `given_up` some ranks have issued more."""
        self._engine.finish(given_up)
