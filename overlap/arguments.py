"""The arguments that every strategy's ``DistributedOptimizer`` has in common with Horovod's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from overlap.communicator import ReduceOp
from overlap.horovod.compression import NoneCompressor
from overlap.horovod.process_set import ProcessSet, global_process_set
from overlap.kinds import check_kinds

__all__ = ["SHELL", "HorovodArguments", "check_passes"]


#: Arguments of the wrapper itself, which every strategy's function hands on: see `overlap.optimizer`.
SHELL = ("elementwise", "per_parameter", "sync_start", "poison")


@dataclass(frozen=True)
class HorovodArguments:
    """Horovod's, but for the first two, in Horovod's order.

    Args:
        compression: what gradients become on the wire: ``Compression.none``, ``.fp16``, ``.bf16`` (summed in fp32,
            rounded once) or a class with ``compress`` and ``decompress``, whose gradients are reduced whole.
            Parameters travel in their own type, unless the strategy has a `gather_dtype`.
        backward_passes_per_step: backward passes whose gradients are summed before one reduction.
        op: ``Average`` or ``Sum`` over the ranks.
        gradient_predivide_factor: f divides by f before the sum and by size / f after it.
        num_groups: as a number in `groups`.
        groups: how many buckets, of neighbours in the order of arrival, or a list of lists of parameters that share a
            bucket; the strategy decides about parameters that are in none. Tensors of several types need several.
        sparse_as_dense: turn sparse gradients into dense ones; otherwise their rows are gathered, and every rank updates
            those parameters in full.
        process_set: the ranks among which gradients are reduced. Other sets than the global one: on every rank of the
            job, each with its own; a rank outside of the set it gives trains alone.
    """

    compression: Any = NoneCompressor
    backward_passes_per_step: int = 1
    op: ReduceOp = ReduceOp.AVG
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> HorovodArguments:
        """Those among the arguments of a strategy's function, ``locals()`` in its first line.

        Raises ``TypeError`` for values of the wrong kind, and for names in its ``shell`` that no wrapper has, unless
        another strategy takes them.
        """
        check_kinds({**scope, **scope["shell"]})
        if scope.get("strategy", "dear") == "dear":
            _refuse_unknown(scope["shell"], (*(name for name in scope if name != "shell"), *SHELL))
        return cls(**{field.name: scope[field.name] for field in fields(cls)})


def _refuse_unknown(shell: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in shell:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"is {near[0]!r} meant?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"DistributedOptimizer() has no argument {name!r}; {advice}")


def check_passes(passes: int) -> None:
    """Raise ``ValueError``, or ``TypeError``, for a number of backward passes per step that is none."""
    check_kinds({"backward_passes_per_step": passes})
    if passes < 1:
        raise ValueError(f"backward_passes_per_step should be at least 1 and is {passes}")
