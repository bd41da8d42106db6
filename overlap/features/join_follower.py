"""Follows, on a rank that is out of data, what other ranks' scripts do with an optimizer (`overlap.features.join`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from overlap.core.averages import Averages
from overlap.core.engine import Engine
from overlap.core.step import Stepper, hyper_parameters, take_hyper_parameters
from overlap.features.clipping import clip, norm_of, scale
from overlap.features.join import CannotJoin, Word
from overlap.features.join_rounds import JoinRounds
from overlap.features.loss_scale import reveal_infinities

__all__ = ["Follower"]

_Step = Callable[[torch.Tensor | None, bool, Callable[[], Any] | None], None]


class Follower:
    """Takes part in the rounds of one optimizer without contributing, and uses their results as the others do.

    `step` is the optimizer's whole step, hooks included, with what a GradScaler would leave and a closure: every rank
    counts the same steps. Shards that this rank owns are updated with the others' hyper-parameters, which become this
    rank's.
    """

    def __init__(
        self,
        engine: Engine,
        rounds: JoinRounds,
        averages: Averages,
        stepper: Stepper,
        optimizer: torch.optim.Optimizer,
        step: weakref.WeakMethod[Any],
    ) -> None:
        self._engine, self._rounds, self._averages, self._stepper = engine, rounds, averages, stepper
        self._optimizer, self._step_of = optimizer, step
        self.topic, self.ranks = rounds.topic, rounds.ranks

    @property
    def place(self) -> tuple[int, int]:
        """The number of rounds that are over on this rank, and of the words about the current one."""
        return self._rounds.place

    @property
    def hyper_parameters(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each group."""
        return hyper_parameters(self._optimizer)

    def arrive(self) -> None:
        """Wait for parameters in transit."""
        self._engine.transit.arrive_all()

    @property
    def obstacle(self) -> str:
        """The reason why this rank cannot contribute now, or an empty string."""
        engine = self._engine
        if engine.round.touched:
            return "gradients arrived there since its last step(): call step() or zero_grad() before join()"
        if engine.accumulating and any(slot.param.grad is not None for slot in engine.slots):
            return "gradients accumulated there under no_sync(): call step() or zero_grad() before join()"
        if not engine.strategy.complete:
            return f"strategy {engine.strategy.name!r} leaves parts of the communication out (exclude_parts)"
        return ""

    def take_over(self, groups: Sequence[dict[str, Any]]) -> None:
        """Set this rank's hyper-parameters to these."""
        take_hyper_parameters(self._optimizer, groups)

    def keep_up(self, missing: Collection[int]) -> None:
        """Do nothing: the other ranks' words say all that is to be done."""

    def catch_up(self) -> None:
        """Drop the current round, which the others have dropped."""
        self._engine.closing.catch_up()

    def follow(self, word: Word) -> None:
        """Do what the others do. Raises :class:`overlap.features.join.CannotJoin` where that cannot be done."""
        details = word.details
        if word.what == "open":
            self._open(**details)
        elif word.what in ("forward", "backward"):
            self._engine.unsharder.follow(word.what, **details)
        elif word.what == "start":
            self._start(**details)
        elif word.what == "ask":
            self._engine.closing.ask(False, details["call"])
        elif word.what == "again":
            self._engine.close(details["call"], again=True)
        elif word.what == "clip":
            limits = (details[key] for key in ("max_norm", "norm_type", "error_if_nonfinite"))
            clip(self._averages, self._those(details["indices"]), *limits)
        elif word.what == "norm":
            norm_of(self._averages, self._those(details["indices"]), details["norm_type"])
        elif word.what == "scale":
            scale(self._averages, self._those(details["indices"]), details["factor"])
        elif word.what == "synchronize":
            self._averages.synchronize()
        elif word.what == "reveal":
            reveal_infinities(self._averages)
        elif word.what == "infinite":  # a step in which a GradScaler found infinities: it is called, and skips
            self._step(None, True, None)
        elif word.what == "step":
            self.take_over(details["groups"])
            self._step(details["scale"], False, None)
        elif word.what == "fold":
            self._engine.fold()
        elif word.what == "closure":
            self.take_over(details["groups"])
            self._step(None, False, lambda: self._no_loss(details["loss"]))
        elif word.what == "meeting":
            self._engine.closing.meet(details["text"])
        else:
            raise CannotJoin(details["text"])

    def _those(self, indices: Sequence[int]) -> Callable[[torch.Tensor], bool]:
        wanted = {id(self._engine.slots[index].param) for index in indices}
        return lambda param: id(param) in wanted

    def _step(self, scale: torch.Tensor | None, infinite: bool, closure: Callable[[], Any] | None) -> None:
        step: _Step | None = self._step_of()
        assert step is not None, "the optimizer lives as long as this does"
        step(scale, infinite, closure)

    def _open(self, trainable: Sequence[int]) -> None:
        engine = self._engine
        if not self._rounds.hindered:
            self._forget_gradients()
            for slot in engine.slots:
                if slot.param.requires_grad is not (slot.index in trainable):
                    slot.param.requires_grad_(slot.index in trainable)  # unfrozen meanwhile, where training goes on
        if self._rounds.shared_order:
            engine.participants.open()
            engine.round.flush()

    def _start(self, call: str, trainable: Sequence[int]) -> None:
        engine = self._engine
        if not self._rounds.shared_order:
            self._open(trainable)
        engine.close(call)

    def _forget_gradients(self) -> None:
        """Of an earlier step: they would count. Those of earlier passes of this step do."""
        if self._engine.round.folded:
            return
        for slot in self._engine.slots:
            slot.param.grad = None

    def _no_loss(self, like: Any) -> Any:
        self._forget_gradients()
        return torch.zeros_like(like) if isinstance(like, torch.Tensor) else 0.0
