"""Runs a random script: on this rank with a distributed optimizer, or for all ranks in one process with a plain one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import dear
from tests.fuzz.script import LAYERS, Change, End, Kind, Script, Step, Use, Zero

__all__ = ["STRATEGIES", "Apart", "check", "train"]

STRATEGIES: dict[str, dict[str, Any]] = {
    "dear": {"strategy": "dear", "threshold_mb": 0.0005},
    "dear-eager": {"strategy": "dear", "threshold_mb": 0.0005, "eager": True},
    "wfbp": {"strategy": "wfbp"},
    "mgwfbp": {"strategy": "mgwfbp"},
    "bytescheduler": {"strategy": "bytescheduler_adapter", "partition_mb": 0.0001, "credit_mb": 0.0004},
    "fsdp": {"strategy": "fsdp", "threshold_mb": 0.0005},
    "oss": {"strategy": "oss", "threshold_mb": 0.0005},
}
WIDTH = 5
MAX_NORM = 0.02


class Apart(AssertionError):
    """Results differ from those of one process, or between ranks."""


class _Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.extra = nn.Linear(WIDTH, WIDTH)  # takes part once its group is added
        if tied:
            self.layers[2].weight = self.layers[1].weight
        self.with_extra = False

    def forward(self, x: torch.Tensor, use: Use) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if use is Use.WHOLE or number in (0, LAYERS - 1):
                x = torch.tanh(layer(x))
        return self.extra(x) if self.with_extra and use is Use.WHOLE else x


class _Trainer:
    """`ranks` are those whose batches are used here: this rank's own, or all of them."""

    def __init__(
        self, script: Script, ranks: Sequence[int], wrap: Callable[[torch.optim.Optimizer, nn.Module], Any] | None
    ) -> None:
        torch.manual_seed(script.seed)
        self.script, self.ranks, self.alone = script, ranks, wrap is None
        self.model = _Model(script.tied).double()
        trained = list(self.model.layers.parameters())
        plain: torch.optim.Optimizer = (
            torch.optim.Adam(trained, 0.01) if script.adam else torch.optim.SGD(trained, 0.1, momentum=0.9)
        )
        self.optimizer: Any = plain if wrap is None else wrap(plain, self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.scaler.scale(torch.ones(1))  # it makes its scale in its first use, which a rank without a batch has not
        self.trains = {rank: {id(p) for p in self.model.parameters()} for rank in range(script.ranks)}
        self.saved: tuple[Any, Any] | None = None
        self.norms: list[float] = []

    # - Steps

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.script.set_to_none)

    def step(self, number: int, step: Step) -> None:
        for change in step.changes:
            self._change(number, change)
        if self.script.zero in (Zero.BEFORE, Zero.TWICE):
            self.zero()
        if self.script.zero is Zero.TWICE:
            self.zero()
        if step.end is End.CLOSURE:
            self.optimizer.step(lambda: self._closure(number, step))
        else:
            self._backward(number, step)
            self._end(step)
        if self.script.zero is Zero.AFTER and step.end not in (End.SKIP, End.SKIP_BY_MODEL, End.SKIP_CLIPPED):
            self.zero()

    def _closure(self, number: int, step: Step) -> float:
        self._backward(number, step)
        return 0.0

    def _backward(self, number: int, step: Step) -> None:
        scaled = step.end in (End.SCALER, End.INFINITE)
        for turn, uses in enumerate(step.passes):
            last = turn == len(step.passes) - 1
            with contextlib.nullcontext() if last or self.alone else self.optimizer.no_sync():
                for rank in self.ranks:
                    if uses[rank] is Use.NOTHING:
                        continue
                    with self._as_on(rank):
                        loss = self._loss(number, turn, rank, uses[rank])
                        if step.end is End.INFINITE and last and rank == self.script.ranks - 1:
                            loss = loss * float("inf")
                        self._gradients(self.scaler.scale(loss) if scaled else loss, step.by_hand)

    def _loss(self, number: int, turn: int, rank: int, use: Use) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * number + 100 * turn + rank)
        loss = self.model(torch.randn(3, WIDTH, dtype=torch.float64, generator=generator), use).square().mean()
        return loss / self.script.ranks if self.alone else loss

    def _gradients(self, loss: torch.Tensor, by_hand: bool) -> None:
        if not loss.requires_grad:
            return
        if not by_hand:
            loss.backward()
            return
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        for param, gradient in zip(params, torch.autograd.grad(loss, params, allow_unused=True), strict=True):
            if gradient is not None:
                param.grad = gradient if param.grad is None else param.grad + gradient

    @contextlib.contextmanager
    def _as_on(self, rank: int) -> Any:
        """In one process: with the parameters trained that `rank` trains."""
        if not self.alone:
            yield
            return
        before = [(p, p.requires_grad) for p in self.model.parameters()]
        for param, _ in before:
            param.requires_grad_(id(param) in self.trains[rank])
        yield
        for param, trained in before:
            param.requires_grad_(trained)

    def _end(self, step: Step) -> None:
        optimizer, params = self.optimizer, list(self.model.parameters())
        if step.end in (End.CLIP, End.SKIP_CLIPPED):
            clip = nn.utils.clip_grad_norm_ if self.alone else None
            norm = clip(params, MAX_NORM) if clip is not None else optimizer.clip_grad_norm_(MAX_NORM)
            self.norms.append(float(norm))
        if step.end is End.SYNCHRONIZE and self.alone:
            nn.utils.clip_grad_norm_(params, MAX_NORM)
        elif step.end is End.SYNCHRONIZE:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(params, MAX_NORM)
            with optimizer.skip_synchronize():
                optimizer.step()
            return
        if step.end in (End.SKIP, End.SKIP_CLIPPED):
            self.zero()
        elif step.end is End.SKIP_BY_MODEL:
            self.model.zero_grad(set_to_none=self.script.set_to_none)
        elif step.end in (End.SCALER, End.INFINITE):
            if any(use is not Use.NOTHING for uses in step.passes for use in uses):  # else a plain scaler raises
                self.scaler.step(optimizer)
                self.scaler.update()
        else:
            optimizer.step()

    # - Changes

    def _change(self, number: int, change: Change) -> None:
        layer = list(self.model.layers[change.number].parameters())
        if change.kind in (Kind.FREEZE, Kind.THAW):
            self._train(layer, range(self.script.ranks), trained=change.kind is Kind.THAW)
        elif change.kind is Kind.THAW_HERE:
            self._train(layer, [change.rank], trained=True)
        elif change.kind is Kind.RATE:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.75
        elif change.kind is Kind.METRIC and not self.alone:
            dear.allreduce(torch.ones(2), name=f"metric {number}")
        elif change.kind is Kind.SAVE:
            self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        elif change.kind is Kind.LOAD and self.saved is not None:
            self.model.load_state_dict(self.saved[0])
            self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))
        elif change.kind is Kind.ADD:
            self.optimizer.add_param_group({"params": list(self.model.extra.parameters()), "lr": 0.02})
            self.model.with_extra = True
        elif change.kind is Kind.SWAP:
            with contextlib.nullcontext() if self.alone else dear.whole(self.model):
                weight = self.model.layers[change.number].weight
                weight.data = weight.data.clone()

    def _train(self, layer: list[nn.Parameter], ranks: Sequence[int], *, trained: bool) -> None:
        for param in layer:
            for rank in ranks:
                (self.trains[rank].add if trained else self.trains[rank].discard)(id(param))
            if self.alone:
                param.requires_grad_(any(id(param) in trains for trains in self.trains.values()))
            elif self.ranks[0] in ranks:
                param.requires_grad_(trained)

    @property
    def values(self) -> torch.Tensor:
        return torch.cat([value.flatten() for value in self.model.state_dict().values()])


def train(script: Script, strategy: str, wrap: Callable[..., Any] = dear.DistributedOptimizer) -> list[torch.Tensor]:
    """This rank's part, compared with one process wherever the script looks. Raises :class:`Apart`.

    Returns the parameters that it has seen. On every rank.
    """
    mine = _Trainer(script, [dear.rank()], lambda plain, model: wrap(plain, model, **STRATEGIES[strategy]))
    alone = _Trainer(script, range(script.ranks), None)
    seen = []
    for number, step in enumerate(script.steps):
        mine.step(number, step)
        alone.step(number, step)
        if step.looks:
            seen.append(mine.values.clone())
            _compare(f"parameters after step {number}", seen[-1], alone.values)
            _compare(f"norms up to step {number}", torch.tensor(mine.norms), torch.tensor(alone.norms))
    mine.optimizer.synchronize()
    return seen


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.allclose(found, expected, rtol=1e-7, atol=1e-9, equal_nan=False):
        raise Apart(f"{what} differ from one process by {float((found - expected).abs().max()):.3g}")


def check(script: Script, strategy: str, wrap: Callable[..., Any] = dear.DistributedOptimizer) -> str:
    """What is wrong with a script's outcome on this job, the same text on every rank; an empty one if nothing is.

    A script gives what one process gives, on every rank, or raises on every rank, where it may.
    """
    said, seen = "", []
    try:
        seen = train(script, strategy, wrap)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    heard = dear.allgather_object((said, seen))
    texts = [text for text, _ in heard]
    if all(texts) and script.may_raise and not any(text.startswith("Apart") for text in texts):
        return ""
    if any(texts):
        return " | ".join(f"rank {rank}: {text or 'nothing'}" for rank, text in enumerate(texts))
    first = heard[0][1]
    if any(not torch.equal(a, b) for _, other in heard for a, b in zip(first, other, strict=True)):
        return "ranks hold different parameters"
    return ""
