"""The arguments of fairscale's ``FullyShardedDataParallel``: what each means here, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.nn.modules.batchnorm import _NormBase

from overlap.transport.cuda import streams

__all__ = ["Options"]

_REDUCED_BY = (None, "default", "reduce_scatter")  # the latter are fairscale's ProcessGroupName


@dataclass(frozen=True)
class Options:
    """The arguments of one wrapper, with fairscale's names, that are more than the module, its ranks and their layout.

    Raises ``NotImplementedError`` for what is not built, ``ValueError`` for what contradicts itself, ``TypeError`` for a
    value of the wrong kind, each with the name of the argument and the remedy.
    """

    reshard_after_forward: bool = True
    disable_reshard_on_root: bool = True
    mixed_precision: bool = False
    fp32_reduce_scatter: bool = False
    flatten_parameters: bool = True
    move_params_to_cpu: bool = False
    compute_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    move_grads_to_cpu: bool | None = None
    bucket_cap_mb: float | None = None
    compute_device: torch.device | None = None
    no_broadcast_optim_state: bool = False
    state_dict_device: torch.device | None = None
    clear_autocast_cache: bool = False
    force_input_to_fp32: bool = False
    verbose: bool = False
    cpu_offload: bool = False
    state_dict_on_rank_0_only: bool = False
    gradient_predivide_factor: float | None = None
    allow_reset_parameters: bool = False

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Options:
        """Those among the ``locals()`` of the constructor in its first line."""
        return cls(**{field.name: scope[field.name] for field in fields(cls)})

    def __post_init__(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if isinstance(type(self).__dataclass_fields__[name].default, bool) and value not in (True, False, None):
                raise TypeError(f"{name} should be True or False and is {value!r}")
        self._check_number("bucket_cap_mb", least=0)
        self._check_number("gradient_predivide_factor", least=None)
        if self.fp32_reduce_scatter and not self.mixed_precision:
            raise ValueError(
                "fp32_reduce_scatter=True without mixed_precision=True: gradients travel in the type of the parameters as "
                "it is; leave it out"
            )
        if self.force_input_to_fp32 and self.mixed_precision:
            raise ValueError(
                "force_input_to_fp32=True with mixed_precision=True: a module that computes in 16 bits takes inputs of 16 "
                "bits; leave one of them out"
            )
        if self.no_broadcast_optim_state:
            raise NotImplementedError(
                "no_broadcast_optim_state=True: all modules of a model are sharded over the same ranks, so no rank has "
                "state that others do not know; leave it out, and have experts in a model and an optimizer of their own"
            )

    def _check_number(self, name: str, least: float | None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name} should be a number or None and is {value!r}")
        number = float(value)
        if not (number > 0 if least is None else number >= least):
            raise ValueError(f"{name} should be {'above 0' if least is None else f'at least {least}'} and is {value}")

    # - What they mean here

    @property
    def precision(self) -> MixedPrecisionPolicy:
        """The types of ``fully_shard()``. Inputs of the outermost module alone are cast, as by fairscale."""
        wanted = torch.float16 if self.compute_dtype is None else self.compute_dtype
        if not self.mixed_precision or wanted in (torch.float32, torch.float64):
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        return MixedPrecisionPolicy(
            param_dtype=wanted, reduce_dtype=torch.float32 if self.fp32_reduce_scatter else None
        )

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Whether shares of a module on a GPU are in the CPU's memory."""
        return CPUOffloadPolicy() if self.move_params_to_cpu or self.cpu_offload else OffloadPolicy()

    @property
    def arguments(self) -> dict[str, Any]:
        """What the optimizer is told of the outermost module's."""
        factor = self.gradient_predivide_factor
        return {} if factor is None else {"gradient_predivide_factor": float(factor)}

    def check_types(self, module: torch.nn.Module) -> None:
        """Raise where types and places of parameters and buffers of `module` contradict the arguments."""
        if self.compute_device is not None:
            place = torch.device(self.compute_device).type
            for name, parameter in module.named_parameters():
                if parameter.device.type not in (place, "meta"):
                    raise NotImplementedError(
                        f"compute_device={self.compute_device}, and {name!r} is on {parameter.device}: parameters are used "
                        "where they were when they were sharded; move the model there first"
                    )
        offloads = isinstance(self.offload_policy, CPUOffloadPolicy)
        if self.move_grads_to_cpu not in (None, offloads) and any(map(streams.on_device, module.parameters())):
            raise NotImplementedError(
                f"move_grads_to_cpu={self.move_grads_to_cpu} and move_params_to_cpu={offloads}: shares of gradients lie "
                "where those of parameters do; leave move_grads_to_cpu out"
            )
        wanted = self.precision.param_dtype
        for name, each in module.named_modules() if wanted is not None else ():
            mean = each.running_mean if isinstance(each, _NormBase) else None
            if mean is not None and mean.dtype is not wanted:
                raise NotImplementedError(
                    f"mixed_precision=True computes in {wanted}, and {name!r} keeps statistics in {mean.dtype}, which "
                    f"torch does not mix: convert them, by buffer.data = buffer.data.to({wanted}), or normalise otherwise"
                )
        if self.compute_dtype is not None and not self.mixed_precision:
            for name, parameter in module.named_parameters():
                if parameter.is_floating_point() and parameter.dtype is not self.compute_dtype:
                    raise ValueError(
                        f"compute_dtype={self.compute_dtype} without mixed_precision=True, and {name!r} is "
                        f"{parameter.dtype}: give mixed_precision=True, or convert the model"
                    )
        if self.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point() and buffer.dtype is not self.buffer_dtype:
                    raise NotImplementedError(
                        f"buffer_dtype={self.buffer_dtype}, and buffer {name!r} is {buffer.dtype}: buffers keep their "
                        f"types; convert it before, by buffer.data = buffer.data.to({self.buffer_dtype}), or leave "
                        "buffer_dtype out"
                    )

    def check_inside(self, inner: Options, name: str) -> None:
        """Raise where a wrapper `inner`, of the module `name`, computes in another type than the one around it."""
        for what in ("param_dtype", "reduce_dtype"):
            mine, others = getattr(self.precision, what), getattr(inner.precision, what)
            if mine != others:
                raise NotImplementedError(
                    f"mixed_precision, compute_dtype and fp32_reduce_scatter make {what} {others} in {name!r} and {mine} "
                    "around it: give all wrappers of a model the same"
                )


def check_reduced_by(process_group_reduce_scatter: Any, members: list[int] | None) -> None:
    """Raise unless it is None, one of fairscale's names for a process group, or a group of the same `members`.

    None as members: all ranks.
    """
    if isinstance(process_group_reduce_scatter, str | None) and process_group_reduce_scatter in _REDUCED_BY:
        return
    if not isinstance(process_group_reduce_scatter, torch.distributed.ProcessGroup):
        raise TypeError(
            f"process_group_reduce_scatter should be a process group or None and is {process_group_reduce_scatter!r}"
        )
    theirs = sorted(torch.distributed.get_process_group_ranks(process_group_reduce_scatter))
    own = list(range(torch.distributed.get_world_size())) if members is None else sorted(members)
    if theirs != own:
        raise ValueError(
            f"process_group_reduce_scatter has ranks {theirs} and process_group {own}: gradients are reduced over the "
            "ranks among which parameters are sharded; leave it out"
        )
