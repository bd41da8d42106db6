"""fairscale's arguments and names that this package lacks, each with what to use instead. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["NOT_HERE", "refuse_fairscales_names"]

_FSDP = (
    "oss has no FullyShardedDataParallel: every rank keeps all parameters, and OSS with ShardedDataParallel splits the "
    "optimizer's state; fsdp has it, as fsdp.FullyShardedDataParallel"
)
_PIPE = "oss has no pipeline parallelism; torch has it in torch.distributed.pipelining"
_TENSORS = "oss has no model parallelism within layers; torch has it in torch.distributed.tensor.parallel"
#: What a script may look for in `oss` that fairscale has: the whole message.
NOT_HERE: Mapping[str, str] = {
    "FullyShardedDataParallel": _FSDP,
    "FSDP": _FSDP,
    "Pipe": _PIPE,
    "PipeRPCWrapper": _PIPE,
    "model_parallel": _TENSORS,
    "nn": "oss has no nn, and nothing is nested here: ShardedDataParallel and checkpoint_wrapper are names of oss itself. "
    "fsdp has fairscale's FullyShardedDataParallel; for Pipe and model_parallel torch has torch.distributed.pipelining "
    "and .tensor.parallel",
    "optim": "oss has no optim: OSS and ShardedGradScaler are names of oss itself",
    "AdaScale": "oss has no AdaScale: scale the learning rate in the script",
}

_INSTEAD = {
    "optim": "build the optimizer yourself and pass it as the first argument",
    "group": "process_set takes ranks",
    "process_group": "process_set takes ranks",
    "broadcast_fp16": "gather_dtype=torch.float16 (or bfloat16) sends parameters in 16 bits; owners keep exact ones, and "
    "all ranks, owners too, compute with the rounded ones",
    "reduce_fp16": "compression=Compression.fp16 (or bf16) sends gradients in 16 bits, summed in fp32",
    "broadcast_buffer_size": "parameters travel in the buckets of their gradients, which threshold_mb limits",
    "reduce_buffer_size": "threshold_mb limits buckets, in MB instead of elements",
    "force_broadcast_object": "state_dict() asks for the other ranks' state by itself",
    "sync_models_at_startup": "sync_start is its name here",
    "auto_refresh_trainable": "parameters that are frozen or unfrozen are always followed",
    "warn_on_trainable_params_changed": "parameters that are frozen or unfrozen are always followed",
}


def refuse_fairscales_names(arguments: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for the first argument with a name of fairscale's, naming its counterpart here."""
    for name, value in arguments.items():
        if name in _INSTEAD:
            raise TypeError(
                f"{name}={value!r} is fairscale's; {_INSTEAD[name]}. oss.OSS and oss.ShardedDataParallel take these names"
            )
