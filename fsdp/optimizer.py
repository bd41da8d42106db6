"""Fully sharded data parallel (Rajbhandari et al., ZeRO stage 3, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023).

compute | fwd L1 | fwd L2 | fwd L3 | bwd L3 | bwd L2 | bwd L1 | step
gathers | AG b0 AG b1 | AG b2 |    AG b1 | AG b0 |            AG b0 …
reduces |                                   | RS b2 | RS b1 | RS b0

DeAR's schedule with one more decision for each bucket: whole parameters are freed after their use, and gathered once more
for backward. All ranks gather the same buckets in the same order, whatever modules each of them uses
(`overlap.plan.sweeps`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import torch

from overlap.job.groups import ShardGroups
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.optimizer.arguments import SharedArguments, refuses_unknown
from overlap.optimizer.dears_arguments import understands_dears_names
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.optimizer.sharding import module_of, needs_owners, refuse_offload_of_owned, sizes
from overlap.optimizer.start import agree_on_strategy
from overlap.plan.sharded import Sharded
from overlap.transport.communicator import ReduceOp
from overlap.transport.compression import NoneCompressor

__all__ = ["DistributedOptimizer", "Fsdp", "automatic"]


class Fsdp(Sharded):
    """The strategy: whole parameters are freed after each use."""

    name = "fsdp"


@understands_dears_names
@refuses_unknown()
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = NoneCompressor,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVG,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    threshold_mb: float | Literal["auto"] | None = "auto",
    whole_mb: float | Literal["auto"] = "auto",
    gather_dtype: torch.dtype | None = None,
    shard_group: ShardGroups = None,
    offload: Literal["cpu"] | None = None,
    elementwise: bool | None = None,
    per_parameter: bool | None = None,
    sync_start: bool = True,
    poison: bool | None = None,
    broadcast_buffers: bool = True,
    check_every: int | None = None,
    on_nonfinite: str = "raise",
) -> Shell:
    """Distribute `optimizer` and shard the model: a rank keeps its share of parameters, gradients and state between uses.

    Between passes parameters read as NaN; ``model.state_dict()`` has whole values on any rank that asks, and
    ``model.load_state_dict()`` takes them, on every rank. Every rank makes the same number of forward and of backward
    passes, and may leave out any modules in them.

    Args:
        optimizer: any ``torch.optim.Optimizer``. Its state, and the parameters, are sharded: cut anywhere if it is known to
            work element by element, or `elementwise` promises that; by whole parameters if it is known to work one by one
            (Adafactor, Muon), or `per_parameter` promises that. Otherwise every rank keeps all of both.
        named_parameters: the module, which decides what is gathered when. Raises ``TypeError`` for anything else.
        compression: this, and what follows up to `process_set`: as in Horovod; see
            :class:`overlap.optimizer.arguments.HorovodArguments`.
        threshold_mb: layers are fused, in the order in which the model defines them, while a bucket stays below this many
            MB (2^20 bytes); 0: a bucket for each layer. ``"auto"``: what the environment variable ``DEAR_THRESHOLD_MB``
            says; else a 32nd of the parameters that are trained, at least 1 and at most 25.
        whole_mb: the MB of parameters that a rank may have whole beside those that are used at the moment: gathered ahead
            of their use, or not freed yet. As much of the gradients may be on its way. ``"auto"``: four buckets of the
            median size.
        gather_dtype: ``torch.bfloat16`` or ``torch.float16``: whole parameters travel, and are used in every pass, rounded
            to this type. Shards, the optimizer and ``model.state_dict()`` have exact values. Only for parameters of float32
            or float64 whose updates are sharded.
        shard_group: parameters, gradients and state are sharded among so many neighbouring ranks, or among those of a
            ``"host"``, or within each of these groups of ranks, and gradients are averaged over all groups: gathers stay
            inside a group (hybrid sharding). None: among all ranks.
        offload: ``"cpu"``: of a model on a GPU, shards of parameters and gradients, and the optimizer's state, are in the
            CPU's memory, pinned, and the optimizer updates there; ``ValueError`` for one that needs whole parameters. Of a
            model on CPUs they are there as it is. Not run on a GPU yet. None: they are where the model is.
        elementwise: this, and `per_parameter`, `sync_start`, `poison`, `broadcast_buffers`, `check_every`,
            `on_nonfinite`: see :class:`overlap.optimizer.arguments.SharedArguments`.

    On every rank, after ``fsdp.init()``.
    """
    arguments = SharedArguments.of(locals())
    agree_on_strategy("fsdp")
    model = module_of(named_parameters, "fsdp")
    strategy = automatic(
        optimizer,
        arguments,
        threshold_mb,
        whole_mb,
        gather_dtype=gather_dtype,
        shard_group=shard_group,
        offload=offload == "cpu",
    )
    return Shell(optimizer, model, strategy, arguments)


def automatic(
    optimizer: torch.optim.Optimizer,
    arguments: SharedArguments,
    threshold_mb: float | Literal["auto"] | None = "auto",
    whole_mb: float | Literal["auto"] = "auto",
    stay: Collection[int] = (),
    *,
    gather_dtype: torch.dtype | None = None,
    param_dtype: torch.dtype | None = None,
    shard_group: ShardGroups = None,
    offload: bool = False,
) -> Fsdp:
    """The strategy for the parameters of `optimizer`, which chooses what the other arguments leave to it.

    `arguments` may hold promises about it.
    """
    owned = needs_owners(optimizer, arguments)
    if offload and owned:
        refuse_offload_of_owned(optimizer)
    chosen = sizes(optimizer, threshold_mb, whole_mb)
    return Fsdp(*chosen, stay, gather_dtype, param_dtype, shard_group, owned=owned, offload=offload)
