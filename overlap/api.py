"""The functions that every strategy's package offers: those of ``horovod.torch``, and our own additions."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from comm_core import __version__
from overlap import elastic
from overlap.horovod.allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from overlap.horovod.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from overlap.horovod.alltoall import alltoall, alltoall_async
from overlap.horovod.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from overlap.horovod.controller.errors import HorovodInternalError
from overlap.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from overlap.horovod.job import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
)
from overlap.horovod.mesh import Mesh
from overlap.horovod.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from overlap.horovod.reduction import Adasum, Average, Max, Min, Product, Sum
from overlap.horovod.sparse import sparse_allreduce_async
from overlap.horovod.sync_batch_norm import SyncBatchNorm
from overlap.horovod.synchronization import barrier, join, poll, synchronize
from overlap.horovod.timeline import draw_timeline, start_timeline, stop_timeline
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import current
from overlap.optimizer.replicas import check_replicas
from overlap.optimizer.saving.checkpoints import load_checkpoint, save_checkpoint, sharded_state_dict
from overlap.optimizer.saving.dtensors import dtensor_state_dict, load_dtensor_state_dict
from overlap.optimizer.saving.pretrained import load_pretrained, save_pretrained
from overlap.optimizer.whole import full_state_dict, whole
from overlap.state.deferred_init import deferred_init, materialize
from overlap.transport import compression
from overlap.transport.compression import Compression, Compressor

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "HorovodInternalError",
    "Max",
    "Mesh",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_replicas",
    "clip_grad_norm_",
    "compression",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "deferred_init",
    "draw_timeline",
    "dtensor_state_dict",
    "elastic",
    "full_state_dict",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_checkpoint",
    "load_dtensor_state_dict",
    "load_pretrained",
    "local_rank",
    "local_size",
    "materialize",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "save_checkpoint",
    "save_pretrained",
    "sharded_state_dict",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "whole",
]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for gradients averaged over ranks, whole or sharded. On every rank.

    Raises ``ValueError`` if the parameters do not all belong to one distributed optimizer, and ``TypeError`` for what is
    no tensor.
    """
    several = isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor)
    chosen = list(parameters) if several else [parameters]
    tensors = [one for one in chosen if isinstance(one, torch.Tensor)]
    if len(tensors) < len(chosen):
        stranger = next(type(one).__name__ for one in chosen if not isinstance(one, torch.Tensor))
        raise TypeError(
            f"parameters should be tensors, such as model.parameters(), and a {stranger} is none; all that an "
            "optimizer holds are clipped by optimizer.clip_grad_norm_(max_norm)"
        )
    wanted, registry = {id(parameter) for parameter in tensors}, current().registry
    for optimizer in registry.having(tensors) if tensors else registry.optimizers:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if wanted <= held:
            return optimizer._clip(lambda param: id(param) in wanted, max_norm, norm_type, error_if_nonfinite)
        raise ValueError(
            f"{len(wanted - held)} of {len(wanted)} parameters do not belong to the distributed optimizer that holds "
            "the others; clip each optimizer's parameters by themselves"
        )
    raise ValueError("the parameters belong to no distributed optimizer; wrap their optimizer first")
