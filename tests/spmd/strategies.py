"""Every strategy and optimizer by the name that tests have for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim

import bytescheduler_adapter
import dear
import fsdp
import mgwfbp
import osdp
import oss
import wfbp
from overlap.core.bucket import Phase
from overlap.job.levels import Levels
from overlap.job.session import current
from tests.spmd.loops import MakeOptimizer
from tests.spmd.models import adafactor
from tests.spmd_plugin import OVER_MPI, SIZE

__all__ = [
    "NAMELESS",
    "NOT_EAGER",
    "OF_SETS",
    "OPTIMIZERS",
    "OWNED",
    "PACKAGES",
    "POLICIES",
    "SHARDED",
    "STAND_INS",
    "STRATEGIES",
    "VARIANTS",
    "WRAP",
    "as_early_as_possible",
    "hosts",
    "on_hosts",
]

STRATEGIES: dict[str, Callable[..., Any]] = {
    "dear": dear.DistributedOptimizer,
    "dear-layerwise": lambda o, m, **k: dear.DistributedOptimizer(o, m, threshold_mb=None, num_nearby_layers=1, **k),
    "wfbp": wfbp.DistributedOptimizer,
    "mgwfbp": lambda o, m, **k: mgwfbp.DistributedOptimizer(o, m, alpha_beta=(3e-5, 1e-9), profile_steps=3, **k),
}
# Policies of a strategy above, and others that update as those do: all models and loops, with one optimizer.
VARIANTS: dict[str, Callable[..., Any]] = {
    "dear-rb": lambda o, m, **k: dear.DistributedOptimizer(o, m, policy="rb", threshold_mb=0.001, **k),
    "dear-whole": lambda o, m, **k: dear.DistributedOptimizer(o, m, all_reduced=0.5, threshold_mb=0.001, **k),
    "fsdp": lambda o, m, **k: fsdp.DistributedOptimizer(o, m, threshold_mb=0.001, **k),
    "osdp": lambda o, m, **k: osdp.DistributedOptimizer(o, m, threshold_mb=0.001, memory_limit_gb=1000, **k),
    "oss": lambda o, m, **k: oss.DistributedOptimizer(o, m, threshold_mb=0.001, **k),
    "dear-eager": lambda o, m, **k: as_early_as_possible(
        dear.DistributedOptimizer(o, m, eager=True, threshold_mb=0.001, **k)
    ),
    "bytescheduler": lambda o, m, **k: bytescheduler_adapter.DistributedOptimizer(
        o, m, partition_mb=0.001, credit_mb=0.002, **k
    ),
}
# Refused by early updates, see test_eager.py.
NOT_EAGER = {
    "clipped",
    "clipped_by_largest",
    "clipped_after_synchronize",
    "skipped_steps",
    "skipped_steps_behind_our_back",
    "skipped_where_some_used_nothing",
    "scaled",
    "scaled_and_clipped",
    "scaled_as_with_horovod",
}
if SIZE > 1:  # parameters once per host
    VARIANTS["dear-host"] = lambda o, m, **k: on_hosts(o, m, threshold_mb=0.001, **k)
if SIZE == 4:  # shards within groups of two
    VARIANTS |= {
        "dear-groups": lambda o, m, **k: dear.DistributedOptimizer(o, m, shard_group=2, threshold_mb=0.001, **k),
        "fsdp-groups": lambda o, m, **k: fsdp.DistributedOptimizer(o, m, shard_group=2, threshold_mb=0.001, **k),
    }
WRAP = STRATEGIES | VARIANTS
SHARDED = ("fsdp", "osdp", "fsdp-groups", "fsdp-owned")  # parameters, between passes
OF_SETS = tuple(name for name in WRAP if name != "dear-host")  # may be for a process set
STAND_INS = (*SHARDED, "dear-host")  # ``.grad`` stands for a gradient in shards
# Whose modules these are is found by looking at every object of the process, which takes time, and neither the number of
# ranks nor what connects them has a part in it: at one rank, too, parameters are poisoned until a module hands them out.
NAMELESS: dict[str, Callable[..., Any]] = (
    {"dear-nameless": lambda o, m, **k: dear.DistributedOptimizer(o, threshold_mb=0.001, **k)} if SIZE == 1 else {}
)
# For optimizers that need whole parameters, with any; see test_fsdp_owned.py.
OWNED: dict[str, Callable[..., Any]] = {
    "fsdp-owned": lambda o, m, **k: fsdp.DistributedOptimizer(o, m, per_parameter=True, threshold_mb=0.001, **k),
}
# Policies of dear update as it does: they meet all loops and scripts at two ranks over MPI, and elsewhere all the rest.
POLICIES = () if SIZE == 2 and OVER_MPI else ("dear-rb", "dear-whole", "dear-eager")
# One for each package that is synchronous; the first with several buckets.
PACKAGES = ("dear-layerwise", "wfbp", "mgwfbp", "bytescheduler", "oss")


@contextmanager
def hosts(size: int, two_level: bool = False) -> Iterator[None]:
    """A context in which each `size` neighbouring ranks count as those of a host; on every rank."""
    session = current()
    before = session.hosts, session.levels
    session.hosts = tuple(tuple(range(first, first + size)) for first in range(0, SIZE, size))
    session.levels = (Levels("two_level", session.hosts) if two_level else None,)
    try:
        yield
    finally:
        session.hosts, session.levels = before


def on_hosts(optimizer: Any, model: Any, **options: Any) -> Any:
    """Parameters lie once on each host; four ranks count as those of two hosts."""
    with hosts(2 if SIZE == 4 else SIZE):
        return dear.DistributedOptimizer(optimizer, model, residency="host", **options)


def as_early_as_possible(optimizer: Any) -> Any:
    """With early updates, but not as they happen to come: every gradient hook first awaits the last reduction."""
    policy, round, order = optimizer._engine.policy, optimizer._engine.round, optimizer._engine.order
    update = policy.gradient

    def patient(bucket: Any) -> None:
        for other in order:
            if other.phase is Phase.REDUCING and other.work is not None:
                other.work.wait()
        assert round.quiet
        update(bucket)

    policy.gradient = patient
    return optimizer


def _two_groups(make: Callable[..., torch.optim.Optimizer], **second: Any) -> MakeOptimizer:
    def build(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return make([{"params": params[0::2]}, {"params": params[1::2], **second}])

    return build


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": _two_groups(lambda p: optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1), lr=0.02, nesterov=True),
    "adamw": _two_groups(lambda p: optim.AdamW(p, 3e-3, weight_decay=0.2), lr=1e-3, amsgrad=True),
    "adam": lambda p: optim.Adam(p, 3e-3, weight_decay=0.01),
    # Gradients that are zero but for rounding (of a key's bias in attention) would otherwise grow to the learning rate.
    "adam-steady": lambda p: optim.Adam(p, 3e-3, eps=1e-3),
    "adagrad": lambda p: optim.Adagrad(p, 0.02, initial_accumulator_value=0.1),
    "adadelta": lambda p: optim.Adadelta(p, 0.5),
    "adamax": lambda p: optim.Adamax(p, 3e-3),
    "nadam": lambda p: optim.NAdam(p, 3e-3),
    "radam": lambda p: optim.RAdam(p, 3e-3),
    "rmsprop": lambda p: optim.RMSprop(p, 1e-3, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p, 1e-3),
    "asgd": lambda p: optim.ASGD(p, 1e-2, t0=2),
    "adafactor": lambda p: adafactor(p, 1e-2),
}
