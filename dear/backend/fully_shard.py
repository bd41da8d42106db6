"""Hides more of what ``torch.distributed.fsdp.fully_shard`` sends, on the CPU.

torch relies on streams of a device for that. On the CPU there are none: it waits for each all-gather and each
reduce-scatter where it issues it, whatever the backend. Both can be had otherwise by torch's own means, but that torch
looks at once at what was reduced; only where it does not is backward let on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["overlap"]


def overlap(model: nn.Module) -> None:
    """Send beside computations what a model of torch's ``fully_shard`` sends. On every rank, before its first forward.

    Parameters of a module are gathered while the module before it computes: in forward in the order of
    ``model.modules()``, in backward in torch's. Gradients are reduced while backward goes on, and are there when it ends.
    Where torch reads them at once it waits, as ever: if they add up, are cast (``reduce_dtype``) or divided (float16), are
    reduced over a second axis of the mesh, or have hooks.

    Costs the memory of one more module's parameters in forward. Not for models on a device, whose streams do this.

    Raises:
        ValueError: no module is ``fully_shard``'s.
        RuntimeError: this version of torch cannot do it.
    """
    shards: list[Any] = [module for module in model.modules() if hasattr(module, "set_modules_to_forward_prefetch")]
    if not shards:
        raise ValueError(
            "overlap() takes a model that torch's fully_shard() was called on, and this one has no such module"
        )
    if not all(hasattr(shards[0], name) for name in ("set_custom_reduce_scatter", "_set_unshard_async_op")):
        raise RuntimeError(f"overlap() needs torch 2.9 or newer, and this is {torch.__version__}")
    pending = _Pending()
    shards[0]._set_unshard_async_op(True)
    for module, following in zip(shards, [*shards[1:], None], strict=True):
        module._set_unshard_async_op(True)
        module.set_modules_to_forward_prefetch([] if following is None else [following])
        groups = _groups(module)
        if len(groups) == 1:  # torch takes none for several, which may be of several meshes
            module.set_custom_reduce_scatter(_ReduceScatter(groups[0], pending))


class _Pending:
    """Reductions that one backward pass has begun."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []

    def add(self, work: dist.Work) -> None:
        if not self._works:
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)  # type: ignore[attr-defined]
        self._works.append(work)

    def _wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()


class _ReduceScatter:
    """What ``set_custom_reduce_scatter()`` takes, for the parameters of one `group` of fully_shard's."""

    def __init__(self, group: Any, pending: _Pending) -> None:
        self._group, self._pending = group, pending

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        work = reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=True)
        if op != dist.ReduceOp.AVG or output_tensor.device.type != "cpu" or _reads_at_once(self._group):
            work.wait()
        else:
            self._pending.add(work)
        return work if async_op else None


def _groups(module: Any) -> Sequence[Any]:
    """fully_shard's groups of parameters of a module."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _reads_at_once(group: Any) -> bool:
    """Whether torch computes with the result of a reduce-scatter as soon as it has issued it."""
    if hasattr(group.mesh_info, "replicate_mesh_size") or group._all_reduce_hook is not None:
        return True
    if group._reduce_dtype not in (None, group._orig_dtype):
        return True
    return any(
        one.sharded_param.grad is not None
        or one.offload_to_cpu
        or bool(getattr(one.sharded_param, "_post_accumulate_grad_hooks", None))
        for one in group.fsdp_params
    )
