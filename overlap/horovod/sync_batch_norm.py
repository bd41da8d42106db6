"""Batch normalisation whose statistics are those of the batch on all ranks together.

forward:   announce ─┐ mean, variance of this rank ─▶ heard: all announced the same ─▶ gather ─▶ combine, normalise
backward:  announce ─┘ two sums of this rank       ─▶ heard                         ─▶ reduce ─▶ gradient of the input

The announcement (a few numbers) travels while the statistics are computed. It carries the number of the call, so that
ranks that normalise different layers, or run backward in different orders, learn that instead of mixing their numbers.
The statistics are combined as in Chan, Golub, LeVeque (1983), the backward pass follows Ioffe and Szegedy (2015).
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from overlap.features.join import joined_ranks_of
from overlap.job.session import current
from overlap.transport.communicator import Communicator, ReduceOp, Work
from overlap.transport.compilers import outside_compilers
from overlap.transport.operation import all_gather, all_reduce

__all__ = ["BatchMismatch", "SyncBatchNorm"]

_PURPOSE = "batch norm"
_FORWARD, _BACKWARD = 0, 1
_DIRECTIONS = {_FORWARD: "forward", _BACKWARD: "backward"}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_calls: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()  # forward passes, per communicator


class BatchMismatch(ValueError):
    """Ranks met in different batch norm layers, or in the same one with different numbers of features."""


class _Announcement:
    """What this rank is about to normalise, on its way to the others."""

    def __init__(self, comm: Communicator, direction: int, call: int, features: int, dtype: torch.dtype) -> None:
        self._mine = torch.tensor([direction, call, features, _DTYPES.index(dtype)], dtype=torch.int64, device="cpu")
        self._all = torch.empty(4 * comm.size, dtype=torch.int64, device="cpu")
        self._work: Work = comm.start(all_gather(self._mine, self._all, label="SyncBatchNorm announcement"))

    def heard(self) -> None:
        """Wait for everybody's. Raises :class:`BatchMismatch`, on all ranks, unless they are the same."""
        self._work.wait()
        rows = self._all.view(-1, 4).tolist()
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise BatchMismatch(
                    f"SyncBatchNorm: rank 0 is in {_describe(rows[0])}, rank {rank} in {_describe(row)}; every rank has to "
                    "run the same layers in the same order"
                )


def _describe(row: list[int]) -> str:
    direction, call, features, dtype = row
    return f"{_DIRECTIONS[direction]} pass {call} with {features} features in {_DTYPES[dtype]}"


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C,) to a shape that broadcasts over (N, C, …), in the dtype of `like`."""
    return values.to(like.device, like.dtype).view(1, -1, *(1,) * (like.dim() - 2))


def combine(rows: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Count, mean and biased variance of a whole batch from those of its parts (pure).

    `rows` is (parts, 1 + 2 C): count, C means, C biased variances. Parts with count 0 do not matter.
    """
    counts = rows[:, :1]
    mean, var = torch.where(counts > 0, rows[:, 1:], 0.0).chunk(2, dim=1)
    total = counts.sum()
    whole = (counts * mean).sum(0) / total
    spread = (counts * (var + (mean - whole).square())).sum(0) / total
    return float(total), whole, spread


class _Normalise(torch.autograd.Function):
    """Input (N, C, …), weight and bias (C,) or None; returns output, count, mean and biased variance of all ranks."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        comm: Communicator,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        call = next(_calls.setdefault(comm, itertools.count()))
        features = x.shape[1]
        announcement = _Announcement(comm, _FORWARD, call, features, x.dtype)
        wide = x if x.dtype == torch.float64 else x.float()
        dims = [0, *range(2, x.dim())]
        count = x.numel() // features
        mine = torch.zeros(1 + 2 * features, dtype=torch.float64, device="cpu")
        if count:
            var, mean = torch.var_mean(wide, dims, correction=0)
            mine = torch.cat(
                [
                    torch.tensor([float(count)], dtype=torch.float64, device="cpu"),
                    mean.double().cpu(),
                    var.double().cpu(),
                ]
            )
        announcement.heard()
        rows = torch.empty(comm.size * mine.numel(), dtype=torch.float64, device="cpu")
        comm.run(all_gather(mine, rows, label="SyncBatchNorm statistics"))
        total, mean, var = combine(rows.view(comm.size, -1))
        if total <= 1:
            raise ValueError(
                f"SyncBatchNorm: expected more than 1 value per channel when training, got {total:.0f} on all ranks "
                f"together (input of rank {comm.rank}: {tuple(x.shape)})"
            )
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        inverse = (var + eps).rsqrt()
        ctx.comm, ctx.call, ctx.total, ctx.dims = comm, call, total, dims
        ctx.save_for_backward(x, weight, mean, inverse)
        if count:
            # The kernels take statistics and parameters of one type.
            used_mean, used_var = mean.to(x.device, kind), var.to(x.device, kind)
            used_weight, used_bias = (None if p is None else p.to(kind) for p in (weight, bias))
            out = torch.nn.functional.batch_norm(x, used_mean, used_var, used_weight, used_bias, False, 0.0, eps)
        else:
            out = torch.empty_like(x)
        numbers = torch.tensor(total, dtype=torch.float64, device="cpu")
        ctx.mark_non_differentiable(numbers, mean, var)
        return out, numbers, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, mean, inverse = ctx.saved_tensors
        comm: Communicator = ctx.comm
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        announcement = _Announcement(comm, _BACKWARD, ctx.call, x.shape[1], x.dtype) if needs_x else None
        wide = x if x.dtype == torch.float64 else x.float()
        given = grad.to(wide.dtype)
        centred = wide - _per_channel(mean, wide)
        sum_grad = given.sum(ctx.dims)
        sum_product = (given * centred).sum(ctx.dims)
        grad_weight = (sum_product * inverse.to(x.device)).to(weight.dtype) if needs_weight else None
        grad_bias = sum_grad.to(weight.dtype if weight is not None else x.dtype) if needs_bias else None
        if announcement is None:
            return None, grad_weight, grad_bias, None, None
        announcement.heard()
        sums = torch.cat([sum_grad.double(), sum_product.double()]).cpu()
        comm.run(all_reduce(sums, sums, ReduceOp.SUM, label="SyncBatchNorm gradients"))
        mean_grad, mean_product = (sums / ctx.total).chunk(2)
        scale = inverse if weight is None else inverse * weight.detach().double().cpu()
        grad_x = given - _per_channel(mean_grad, wide)
        grad_x -= centred * _per_channel(mean_product * inverse.square(), wide)
        grad_x *= _per_channel(scale, wide)
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None


@outside_compilers
def _normalised(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, comm: Communicator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _Normalise.apply(x, weight, bias, eps, comm)  # type: ignore[no-any-return]


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Batch normalisation over an input (N, C) or (N, C, …) whose batch is spread over all ranks.

    Equals ``torch.nn.BatchNorm1d/2d/3d`` in one process on the concatenated batch: output, gradients and running
    statistics. Ranks may have different numbers of samples, also none. CPU and GPU tensors in float16, bfloat16, float32
    or float64. Arguments as in torch and Horovod: ``num_features, eps=1e-5, momentum=0.1, affine=True,
    track_running_stats=True``; ``momentum=None`` keeps a cumulative average.

    While training, a forward pass has to run on every rank, and so has its backward pass if the input needs gradients.
    In evaluation running statistics are used and nothing is communicated; with ``track_running_stats=False`` there are
    none, so that evaluation normalises by the batch of all ranks too (as in Horovod, not as in torch, which uses the
    rank's own). Gradients of gradients are not supported.

    After ``join()`` of another rank, a forward pass while training raises :class:`overlap.features.join.CannotJoin` on
    all ranks.

    Raises :class:`BatchMismatch` on all ranks when they meet in different layers, ``ValueError`` for an input of other
    than two or more dimensions or when all ranks together have one value per channel.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions (N, C, …), got shape {tuple(input.shape)}")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} features in dimension 1, got shape {tuple(input.shape)}")
        if input.dtype not in _DTYPES:
            raise ValueError(f"expected a floating-point input, got {input.dtype}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, C, …) to the same shape. On every rank while training."""
        self._check_input_dim(input)
        of_batch = self.training or self.running_mean is None
        if not of_batch or current().comm.size == 1:
            return super().forward(input)
        with joined_ranks_of(current()).needing_everybody("SyncBatchNorm while training"):
            comm = current().channels.named(_PURPOSE)
            out, total, mean, var = _normalised(input, self.weight, self.bias, self.eps, comm)
        if self.training and self.track_running_stats:
            self._track(float(total), mean, var)
        return out

    @torch.no_grad()
    def _track(self, total: float, mean: torch.Tensor, var: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, var * (total / (total - 1.0)))):
            running.copy_((1.0 - share) * running.double() + share * new.to(running.device))

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """`module` with every batch norm layer in it replaced by one of this class, which takes over its tensors.

        Convert before the optimizer is made or after, but before it is distributed. Raises ``ValueError`` for lazy
        layers that have not seen an input yet. Local: no communication.
        """
        replacements: dict[int, torch.nn.Module] = {}
        result = cls._replacement(module, "", replacements)
        for parent_name, parent in list(result.named_modules()):
            for name, child in list(parent._modules.items()):
                if child is not None:
                    path = f"{parent_name}.{name}" if parent_name else name
                    parent._modules[name] = cls._replacement(child, path, replacements)
        return result

    @classmethod
    def _replacement(cls, module: torch.nn.Module, path: str, known: dict[int, torch.nn.Module]) -> torch.nn.Module:
        if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm) or isinstance(module, cls):
            return module
        if id(module) in known:  # a layer used in two places stays one layer
            return known[id(module)]
        if any(torch.nn.parameter.is_lazy(t) for t in (module.weight, module.running_mean) if t is not None):
            raise ValueError(f"layer {path!r} is lazy and has no shape yet: run one forward pass first")
        twin = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        twin.weight, twin.bias = module.weight, module.bias
        twin.running_mean, twin.running_var = module.running_mean, module.running_var
        twin.num_batches_tracked = module.num_batches_tracked
        twin.training = module.training
        known[id(module)] = twin
        return twin
