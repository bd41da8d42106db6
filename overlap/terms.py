"""What the ranks of one optimizer agree on before they communicate anything else: the arguments of the wrapper."""

from __future__ import annotations

from dataclasses import replace

from overlap.arguments import HorovodArguments
from overlap.communicator import Communicator
from overlap.grouping import Groups
from overlap.objects import allgather_object
from overlap.session import current
from overlap.startup import compare
from overlap.strategy import Strategy
from overlap.tuning.options import Tuning
from overlap.updates import Updates

__all__ = ["agree_on_strategy", "agree_on_terms", "terms_of"]


def agree_on_strategy(name: str, tune: bool | Tuning = False) -> None:
    """What a strategy's package calls first, before it measures, or asks rank 0 for, anything of its own.

    Args:
        name: the strategy's.
        tune: whether and how it is tuned; a path in it is rank 0's own.

    On every rank of the job, whatever its process set. Raises ``SignatureMismatch`` on every rank where two differ, and
    ``RuntimeError`` before ``init()``.
    """
    options = replace(tune, path=None) if isinstance(tune, Tuning) else tune
    agree_on_terms(current().control, [f"strategy={name}", f"tune={options!r}"])


def terms_of(
    strategy: Strategy,
    arguments: HorovodArguments,
    updates: Updates,
    groups: Groups,
    *,
    by_loss: bool,
    sync_start: bool,
) -> list[str]:
    """A line for each argument that decides what is communicated (pure). Objects are called by their types' names."""
    values = {
        "strategy": strategy.name,
        **strategy.terms,
        "updates": updates.name.lower(),
        "closures": "by loss" if by_loss else "once",
        "compression": getattr(arguments.compression, "__qualname__", type(arguments.compression).__qualname__),
        "backward_passes_per_step": arguments.backward_passes_per_step,
        "op": getattr(arguments.op, "name", type(arguments.op).__qualname__),
        "gradient_predivide_factor": float(arguments.gradient_predivide_factor),
        "groups": groups,
        "sparse_as_dense": bool(arguments.sparse_as_dense),
        "sync_start": bool(sync_start),
    }
    return [f"{name}={value}" for name, value in values.items()]


def agree_on_terms(comm: Communicator, lines: list[str]) -> None:
    """Raise ``SignatureMismatch`` on every rank unless all bring the same lines. On every rank of `comm`."""
    if comm.size > 1:
        compare("arguments of DistributedOptimizer", allgather_object(comm, lines))
