"""fairscale's OSS: an optimizer whose state is split between ranks by whole parameters."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from oss.grad_scaler import ShardedGradScaler
from oss.owned import OwnedUpdates
from oss.ranks import ranks_of
from overlap.core.gates.compiled import keep_untraced
from overlap.features.loss_scale import is_scaler_step
from overlap.optimizer.arguments import refuse_unknown

__all__ = ["OSS", "Updates"]


class Updates(Protocol):
    """How an OSS makes its steps: alone (`oss.owned`), or with ShardedDataParallel (`oss.data_parallel`)."""

    @property
    def shown(self) -> Any: ...  # the optimizer whose groups and state scripts see
    @property
    def owners(self) -> Mapping[torch.Tensor, int]: ...
    def step(self, closure: Callable[[], Any] | None, **options: Any) -> Any: ...
    def check_scaler(self, agreed: bool) -> None: ...
    def clip(self, wanted: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor: ...
    def consolidate(self, recipient: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def add_param_group(self, param_group: dict[str, Any]) -> None: ...


class OSS(torch.optim.Optimizer):
    """The optimizer `optim` over `params`; the rank that owns a parameter keeps its state, updates it and sends it.

    It works over torch.distributed's process group, which the script makes by ``init_process_group()`` or ``oss.init()``,
    and reduces no gradients: :class:`.ShardedDataParallel` does, or DistributedDataParallel. Where nothing does, each owner
    trains on its own, and the first rank warns once.

    Args:
        params: parameters, or groups of them; the same on every rank.
        optim: the class of an optimizer that updates parameters apart from each other: any but LBFGS.
        group: the ranks, a group of torch.distributed's; None: all.
        broadcast_buffer_size: has no effect, as in fairscale, and a ``DeprecationWarning`` says so.
        broadcast_fp16: float32 and float64 parameters travel, and are used by all ranks, rounded to float16; owners keep
            exact ones.
        force_broadcast_object: state always travels as objects, so both values are met.
        defaults: what `optim` is given.

    Its methods are calls of every rank of the group, but for ``state_dict()`` without `all_ranks` and ``zero_grad()``.
    Raises, on every rank, ``TypeError`` for arguments of other kinds, ``ValueError`` where ranks' parameters differ, and
    ``RuntimeError`` where several processes were started and have no process group.
    """

    def __init__(
        self,
        params: Any,
        optim: type[torch.optim.Optimizer] = torch.optim.SGD,
        group: Any = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **defaults: Any,
    ) -> None:
        if not (isinstance(optim, type) and issubclass(optim, torch.optim.Optimizer)):
            raise TypeError(f"optim should be the class of an optimizer, such as torch.optim.SGD, and is {optim!r}")
        if issubclass(optim, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS looks at all parameters at once, and OSS gives each rank some: use oss.DistributedOptimizer"
            )
        _refuse_unknown(optim, defaults)
        if broadcast_buffer_size != -1:
            warnings.warn(
                f"broadcast_buffer_size={broadcast_buffer_size} has no effect, as in fairscale, which has deprecated it: "
                "leave it out",
                DeprecationWarning,
                stacklevel=2,
            )
        self.ranks = ranks_of(group)
        self.optim = optim(params, **defaults)
        self.broadcast_fp16 = broadcast_fp16
        self._updates: Updates = OwnedUpdates(self.optim, self.ranks, rounds=broadcast_fp16)
        for name in vars(self.optim):
            if name.startswith("_optimizer_"):
                setattr(self, name, OrderedDict())  # hooks on either are its own
        self._patch_step_function()
        keep_untraced(type(self), "step", "zero_grad")

    # - Looks like the wrapped optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._updates.shown.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._updates.shown.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state by parameter: of this rank's own parameters, or under ShardedDataParallel of all."""
        return self._updates.shown.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    @property
    def group(self) -> Any:
        return self.ranks.group

    @property
    def _step_supports_amp_scaling(self) -> bool:
        caller = sys._getframe(1)
        if is_scaler_step(caller):
            self._updates.check_scaler(agreed=isinstance(caller.f_locals["self"], ShardedGradScaler))
        # Alone, the scaler unscales and looks at gradients itself, whatever the optimizer could do.
        return self._updates.shown is not self.optim and self._updates.shown._step_supports_amp_scaling

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an OSS holds a process group and cannot be copied or pickled; use state_dict()")

    def reduced_by(self, make: Callable[[OSS], Updates]) -> None:
        """Have the updates that `make` returns make the steps from now on.

        On every rank; raises ``ValueError`` the second time.
        """
        if not isinstance(self._updates, OwnedUpdates):
            raise ValueError("this OSS belongs to a ShardedDataParallel already: make an OSS for each model")
        before = self._updates.leave()
        try:
            self._updates = make(self)
        finally:  # it goes on as before where that has raised
            if before is not None:
                self._updates.load_state_dict(before)

    # - What scripts call

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Update what this rank owns, and send it. On every rank; raises where these train different parameters."""
        return self._updates.step(closure, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._updates.shown.zero_grad(set_to_none)

    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, filter_params_fn: Callable[[Any], Any] | None = None
    ) -> torch.Tensor:
        """Clip by the norm of the gradients that the owners have. On every rank, which all get that norm."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        wanted = parameters if filter_params_fn is None else list(filter_params_fn(parameters))
        if not {id(parameter) for parameter in wanted} <= {id(parameter) for parameter in parameters}:
            raise ValueError(
                "OSS.clip_grad_norm(): filter_params_fn should choose among the parameters that it is given"
            )
        return self._updates.clip(wanted, max_norm, norm_type)

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Gather the whole state on one rank of the group; with -1, on all ranks. On every rank."""
        if not -1 <= recipient_rank < self.ranks.size:
            raise ValueError(f"recipient_rank should be from -1 to {self.ranks.size - 1} and is {recipient_rank}")
        self._updates.consolidate(recipient_rank)

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The whole state in torch's format, as it was last consolidated; a plain optimizer loads it.

        `all_ranks`: consolidate it first, on every rank. Raises ``RuntimeError`` where that was not done since the last
        step.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if all_ranks:
            self.consolidate_state_dict(-1)
        found = self._updates.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, the same on every rank; each rank keeps the part of what it owns."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._updates.load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._updates.add_param_group(param_group)

    def refresh_trainable(self) -> None:
        """Do nothing: every step looks at ``requires_grad`` by itself."""

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """For each rank, the parameter groups with the parameters that it owns."""
        owners = self._updates.owners
        return [
            [{**group, "params": [p for p in group["params"] if owners.get(p) == rank]} for group in self.param_groups]
            for rank in range(self.ranks.size)
        ]


def _refuse_unknown(optim: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for the first of `defaults` that is an argument neither of `optim` nor of OSS."""
    theirs = inspect.signature(optim).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in theirs.values()):
        ours = [name for name in inspect.signature(OSS).parameters if name != "defaults"]
        known = dict.fromkeys((*ours, *theirs))
        refuse_unknown(defaults, tuple(known), "OSS")
