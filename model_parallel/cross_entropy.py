"""The cross entropy of logits whose words are divided among ranks (Megatron-LM, 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from model_parallel.initialize import tensor_axis
from model_parallel.mappings import summed
from overlap.job.axes import Axis
from overlap.transport.communicator import ReduceOp

__all__ = ["vocab_parallel_cross_entropy"]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, axis: Axis) -> torch.Tensor:
        values = logits.detach()
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        greatest, first, words = _greatest(values, axis)
        ignored = target == ignore_index
        _check(target[~ignored], words)
        shifted = values - greatest.unsqueeze(-1)
        place = target - first
        here = (place >= 0) & (place < values.shape[-1]) & ~ignored
        place = torch.where(here, place, 0)
        mine = shifted.gather(-1, place.unsqueeze(-1)).squeeze(-1)
        exponentials = shifted.exp_()
        # One sum for two: of all exponentials, and of the logit that one rank has.
        total, wanted = summed(torch.stack([exponentials.sum(-1), torch.where(here, mine, 0.0)]), axis)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), place, here, ignored)
        ctx.dtype = logits.dtype
        return torch.where(ignored, 0.0, total.log() - wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, place, here, ignored = ctx.saved_tensors
        found = softmax.clone()
        found.scatter_add_(-1, place.unsqueeze(-1), -here.to(found.dtype).unsqueeze(-1))
        found.mul_(torch.where(ignored, 0.0, gradient).unsqueeze(-1))
        return found.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100
) -> torch.Tensor:
    """The loss of each target, as ``F.cross_entropy(all_logits, target, reduction="none")``; average it yourself.

    On every rank of the tensor axis. `vocab_parallel_logits`, (…, own words), are this rank's words of all, as a
    :class:`.ColumnParallelLinear` without `gather_output` returns them; they are not changed. `target`, (…), has whole
    numbers, the same on every rank. Returns fp32 for logits of 16 bits, and their own type for others. Targets that are
    `ignore_index` have no loss and no gradient. Raises ``IndexError`` on every rank for a target that is no word.
    """
    loss: torch.Tensor = _CrossEntropy.apply(vocab_parallel_logits, target, ignore_index, tensor_axis())
    return loss


def _greatest(values: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, int, int]:
    """The greatest logit of each target on any rank, the number of this rank's first word, and the number of all words.

    The numbers of words travel with the logits: ranks may have different ones.
    """
    counts = values.new_full((axis.size,), -1.0)
    counts[axis.rank] = values.shape[-1]
    found = summed(torch.cat([values.amax(-1).flatten(), counts]), axis, ReduceOp.MAX)
    lengths = [int(length) for length in found[-axis.size :].tolist()]
    return found[: -axis.size].view(values.shape[:-1]), sum(lengths[: axis.rank]), sum(lengths)


def _check(targets: torch.Tensor, words: int) -> None:
    if targets.numel():
        low, high = map(int, torch.aminmax(targets))
        if low < 0 or high >= words:
            raise IndexError(f"targets from {low} to {high}, and logits of {words} words")
