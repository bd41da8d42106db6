"""OSS without ShardedDataParallel: each rank updates the parameters that it owns, and sends them to the others.

step() | agree ─▶ update what is mine ─▶ broadcasts, from every owner in turn, few at a time ─▶ all ranks have all values

Gradients are whose they are: those of DistributedDataParallel, reduced; or this rank's, where nothing reduces them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from oss.parts import Part, narrows, parts_of
from oss.ranks import Ranks
from overlap.plan.assignment import assign_owners

__all__ = ["OwnedUpdates"]

log = logging.getLogger("dear")

_IN_FLIGHT = 4
_ALIKE = 1e-5  # relative; reduced gradients are the same on all ranks, or differ by rounding
_MASTER = "master"  # as in `overlap.state.masters`
_NOT_REDUCED = (
    "gradients differ between ranks in OSS.step(), so nothing has reduced them: each parameter is trained by the gradients "
    "of the rank that owns it, on that rank's data alone. ShardedDataParallel(model, optimizer) or "
    "DistributedDataParallel(model) averages them"
)


class OwnedUpdates:
    """The steps of `optimizer`, which has all parameters; this rank keeps the state of those that it owns.

    With `rounds`, float32 and float64 parameters travel, and are used by all ranks, rounded to float16; owners keep exact
    ones. On every rank. Raises ``ValueError`` on all ranks where their parameters differ.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ranks: Ranks, *, rounds: bool) -> None:
        self.shown, self._ranks, self._rounds = optimizer, ranks, rounds
        self.owners: dict[torch.Tensor, int] = {}
        self._loads = [0] * ranks.size
        self._exact: dict[torch.Tensor, torch.Tensor] = {}  # of what this rank owns
        self._consolidated: dict[str, Any] | None = None
        self._reduced = (
            True if ranks.size == 1 else None
        )  # whether gradients are the same on all ranks; None: not known
        self._assign()

    def _assign(self) -> None:
        """Owners for parameters that have none: a frozen one counts as one element, as in fairscale."""
        described = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in self._parameters]
        if self._differs(repr(described)):
            raise ValueError(
                f"OSS got other parameters on other ranks: rank {self._ranks.rank} has {len(described)}, of "
                f"{sum(math.prod(shape) for shape, _, _ in described)} elements. Build the same model, freeze the same "
                "parameters, and pass them in the same order on every rank"
            )
        new = [parameter for parameter in self._parameters if parameter not in self.owners]
        sizes = [parameter.numel() if parameter.requires_grad else 1 for parameter in new]
        owners = assign_owners(sizes, self._loads)
        for parameter, size, owner in zip(new, sizes, owners, strict=True):
            self.owners[parameter] = owner
            self._loads[owner] += size
        self._forget_others()

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.shown.param_groups for parameter in group["params"]]

    def _mine(self, parameter: torch.Tensor) -> bool:
        return self.owners[parameter] == self._ranks.rank

    def _reduce(self, values: Sequence[float], op: Any = dist.ReduceOp.MAX) -> list[float]:
        return self._ranks.reduce(values, self._parameters[0].device, op)

    def _differs(self, what: str) -> bool:
        """Whether the text is not the same on all ranks. On every rank."""
        number = float(zlib.crc32(what.encode()))
        largest, smallest = self._reduce([number, -number])
        return largest + smallest != 0

    # - The step

    def step(self, closure: Callable[[], Any] | None, **options: Any) -> Any:
        """Update this rank's parameters by their gradients, then give all ranks the owners' values."""
        self._agree()
        self._consolidated = None
        with self._only_mine() as hide:

            def evaluated() -> Any:
                assert closure is not None
                result = closure()
                hide()
                return result

            if closure is None:
                hide()
                result = self._stepped(**options)
            else:
                result = self._stepped(evaluated, **options)
        self._send()
        return result

    def _agree(self) -> None:
        """Raises ``RuntimeError`` on all ranks, before anything is updated, unless all train the same parameters."""
        trained = [parameter.requires_grad for parameter in self._parameters]
        if self._differs(repr(trained)):
            raise RuntimeError(
                f"OSS.step(): ranks train different parameters ({sum(trained)} of {len(trained)} on rank "
                f"{self._ranks.rank}): freeze and unfreeze the same ones on every rank"
            )

    def _stepped(self, *closure: Any, **options: Any) -> Any:
        result = self.shown.step(*closure, **options)
        self._forget_others()
        if self._rounds:
            with torch.no_grad():
                for parameter in filter(self._mine, self._parameters):
                    if parameter.requires_grad and narrows(parameter):
                        self._exact[parameter] = parameter.detach().clone()
                        parameter.copy_(_rounded(parameter))
        return result

    @torch.no_grad()
    def _restore_exact(self) -> None:
        """Before the update, when no forward pass looks any more. Where a script has written since, that counts.

        A frozen parameter stays rounded: it is not updated, so nothing would be sent to the other ranks.
        """
        for parameter, exact in self._exact.items():
            if parameter.requires_grad:
                parameter.copy_(torch.where(_rounded(exact).to(exact.dtype) == parameter, exact, parameter))

    @contextlib.contextmanager
    def _only_mine(self) -> Iterator[Callable[[], None]]:
        """Gives a function that makes ready for the update, and hides the gradients of what others own.

        torch's optimizers leave parameters without gradients alone.
        """
        hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

        def hide() -> None:
            if self._reduced is None:
                self._compare()
                if self._reduced is False and self._ranks.rank == 0:
                    log.warning(_NOT_REDUCED)
            self._restore_exact()
            for parameter in self._parameters:
                if parameter.grad is not None and not self._mine(parameter):
                    hidden.append((parameter, parameter.grad))
                    parameter.grad = None

        try:
            yield hide
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    def _compare(self) -> None:
        """Find out, from the first gradients that there are, whether these are each rank's own."""
        norms = [_norm(parameter.grad, 2.0) for parameter in self._parameters if parameter.grad is not None]
        norm = math.hypot(*norms)
        known = norm if math.isfinite(norm) else 0.0
        largest, smallest = self._reduce([known, -known])
        if largest > 0:
            self._reduced = largest + smallest <= _ALIKE * largest

    def check_scaler(self, agreed: bool) -> None:
        """Check a GradScaler that is about to step; its ranks have `agreed` on infinities, or not.

        On every rank; raises ``RuntimeError`` on all where it could skip the step on some.
        """
        if not agreed and self._reduced is None:
            self._compare()
        if not agreed and self._reduced is False:
            raise RuntimeError(
                "gradients differ between ranks, so torch's GradScaler could skip the step of an OSS on some of them: use "
                "oss.ShardedGradScaler()"
            )

    # - Broadcasts

    def _send(self) -> None:
        """All ranks get the owners' values of what is trained."""
        if self._ranks.size == 1:
            return
        flying: deque[tuple[Part, torch.Tensor, Any]] = deque()
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        for part in parts_of(trained, self.owners, self._rounds):
            buffer = part.packed() if part.owner == self._ranks.rank else part.room()
            flying.append((part, buffer, self._ranks.broadcast(buffer, part.owner)))
            if len(flying) == _IN_FLIGHT:
                self._land(*flying.popleft())
        for arriving in flying:
            self._land(*arriving)

    def _land(self, part: Part, buffer: torch.Tensor, work: Any) -> None:
        work.wait()
        if part.owner != self._ranks.rank:
            part.unpack(buffer)

    # - Clipping

    def clip(self, wanted: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the gradients of the parameters `wanted`, as :meth:`.OSS.clip_grad_norm` does."""
        order = float(norm_type)
        gradients = [(parameter, parameter.grad) for parameter in wanted if parameter.grad is not None]
        mine = [_norm(gradient, order) for parameter, gradient in gradients if self._mine(parameter)]
        if math.isinf(order):
            known = [norm for norm in mine if not math.isnan(norm)]
            greatest, unknown = self._reduce([max(known, default=0.0), float(len(known) < len(mine))])
            total = math.nan if unknown else greatest  # as in torch; a collective's maximum may pass over a NaN
        else:
            (total,) = self._reduce([math.fsum(norm**order for norm in mine)], dist.ReduceOp.SUM)
            total **= 1 / order
        coefficient = min(1.0, max_norm / (total + 1e-6)) if not math.isnan(total) else math.nan
        for _, gradient in gradients:
            gradient.detach().mul_(coefficient)
        return torch.tensor(total)

    # - State

    def _forget_others(self) -> None:
        """State that an optimizer makes for all parameters (Adagrad)."""
        for parameter, owner in self.owners.items():
            if owner != self._ranks.rank:
                self.shown.state.pop(parameter, None)

    def consolidate(self, recipient: int) -> None:
        """Gather the whole state on rank `recipient` of the group; with -1, on all ranks."""
        own: dict[int, Any] = {}
        exact = {}
        for number, parameter in enumerate(self._parameters):
            if self._mine(parameter) and parameter in self.shown.state:
                own[number] = _on_host(self.shown.state[parameter])
            if parameter in self._exact:
                exact[number] = _on_host(self._exact[parameter])
        found = self._ranks.gather((own, exact), recipient, self._parameters[0].device)
        if found is None:
            self._consolidated = None
            return
        saved = self.shown.state_dict()
        saved["state"] = _merged([state for state, _ in found])
        if self._rounds:
            saved[_MASTER] = _merged([masters for _, masters in found])
        self._consolidated = saved

    def state_dict(self) -> dict[str, Any]:
        if self._consolidated is None:
            raise RuntimeError(
                "OSS.state_dict(): state lies on its owners. Call consolidate_state_dict() on every rank first, after the "
                "last step(); state_dict() then works on the recipient"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        parameters = self._parameters
        own = {
            number: state
            for number, state in state_dict["state"].items()
            if not isinstance(number, int) or number >= len(parameters) or self._mine(parameters[number])
        }
        self.shown.load_state_dict({**state_dict, "state": own})
        masters = state_dict.get(_MASTER, {}) if self._rounds else {}
        self._exact = {
            parameter: masters[number].detach().to(parameter.device, parameter.dtype, copy=True)
            for number, parameter in enumerate(parameters)
            if number in masters and self._mine(parameter)
        }
        self._consolidated = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.shown.add_param_group(param_group)
        self._assign()
        self._consolidated = None

    def leave(self) -> dict[str, Any] | None:
        """Hand over the whole state and exact values, on every rank; None where no rank has any.

        They are gone here.
        """
        (used,) = self._reduce([float(bool(self.shown.state or self._exact))])
        if used:
            self.consolidate(-1)
            self.shown.state.clear()
            self._exact.clear()
        return self._consolidated if used else None


def _merged(parts: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
    return dict(sorted((number, value) for part in parts for number, value in part.items()))


def _on_host(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), value)


def _norm(gradient: torch.Tensor, order: float) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(torch.linalg.vector_norm(values.detach(), order))


def _rounded(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float16)
