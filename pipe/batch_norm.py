"""Batch norms whose running statistics are those of the whole batch, not of micro-batches."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from pipe.checkpointing import is_recomputing

__all__ = ["DeferredBatchNorm"]

_Module = TypeVar("_Module", bound=torch.nn.Module)


class DeferredBatchNorm(_BatchNorm):
    """A batch norm that adds up sums over micro-batches, and takes them over with the last one.

    Each micro-batch is normalised by its own statistics, as in GPipe. `micro_batches` is how many there are: ``Pipe``
    says so in each forward pass.
    """

    sum: torch.Tensor
    sum_of_squares: torch.Tensor

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, chunks: int = 1
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.register_buffer("sum", torch.zeros(num_features), persistent=False)
        self.register_buffer("sum_of_squares", torch.zeros(num_features), persistent=False)
        self.micro_batches, self._seen, self._count = chunks, 0, 0

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"a batch norm takes tensors of two or more dimensions, and was given {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if not is_recomputing():
            self._add(input.detach())
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    @torch.no_grad()
    def _add(self, values: torch.Tensor) -> None:
        dims = [dim for dim in range(values.dim()) if dim != 1]
        self.sum += values.sum(dims)
        self.sum_of_squares += values.square().sum(dims)
        self._count += values.numel() // values.shape[1]
        self._seen += 1
        if self._seen >= self.micro_batches:
            self._take_over()

    def _take_over(self) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        mean = self.sum / self._count
        variance = (self.sum_of_squares / self._count - mean.square()) * self._count / max(self._count - 1, 1)
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance, factor)
        self.sum.zero_()
        self.sum_of_squares.zero_()
        self._seen = self._count = 0

    @classmethod
    def convert_deferred_batch_norm(cls, module: _Module, chunks: int = 1) -> _Module:
        """`module` with each batch norm replaced that tracks statistics; its parameters and buffers are taken over."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls) and module.track_running_stats:
            made = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
            for name in ("weight", "bias"):
                made.register_parameter(name, getattr(module, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                made.register_buffer(name, getattr(module, name))
            made.sum = torch.zeros_like(cast(torch.Tensor, module.running_mean))
            made.sum_of_squares = torch.zeros_like(cast(torch.Tensor, module.running_var))
            made.train(module.training)
            return cast(_Module, made)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_deferred_batch_norm(child, chunks))
        return module
