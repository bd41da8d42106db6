"""Arguments of fairscale's OSS and ShardedDataParallel, for whoever tries them here: what stands in their place. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["refuse_fairscales_names"]

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
    """Raise ``TypeError`` with the counterpart for the first argument that is fairscale's."""
    for name, value in arguments.items():
        if name in _INSTEAD:
            raise TypeError(
                f"{name}={value!r} is fairscale's; {_INSTEAD[name]}. oss.OSS and oss.ShardedDataParallel take these names"
            )
