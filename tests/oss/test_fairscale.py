"""Names of fairscale's: misspelt ones are told with the one that is meant, absent ones with what there is instead."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import co2
import oss
from oss.fairscale import NOT_HERE, refuse_fairscales_names

MODEL = nn.Linear(2, 2)


class Open(torch.optim.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


@pytest.mark.parametrize(
    ("make", "given", "told"),
    [
        (oss.OSS, {"broadcast_fp61": True}, r"^OSS\(\) has no argument 'broadcast_fp61'; is 'broadcast_fp16' meant\?$"),
        (oss.OSS, {"optim": torch.optim.AdamW, "weight_deacy": 0.1}, "is 'weight_decay' meant"),
        (oss.OSS, {"xyz": 1}, r"^OSS\(\) has no argument 'xyz'; there are params, optim, group, .*, lr, momentum, "),
        (oss.OSS, {"optim": Open, "xyz": 1}, "unexpected keyword argument 'xyz'"),  # who knows what it takes
        (oss.ShardedDataParallel, {"reduce_bufer_size": 0}, r"^ShardedDataParallel\(\) .*; is 'reduce_buffer_size' meant"),
        (oss.ShardedGradScaler, {"init_scal": 2.0}, r"^ShardedGradScaler\(\) .*; is 'init_scale' meant"),
        (oss.checkpoint_wrapper, {"offload_cpu": True}, r"^checkpoint_wrapper\(\) .*; is 'offload_to_cpu' meant"),
        # As fairscale-CO2's own README spells it.
        (
            co2.CO2DistributedDataParallel,
            {"nproces_per_node": 8},
            r"^CO2DistributedDataParallel\(\) has no argument 'nproces_per_node'; is 'nprocs_per_node' meant\?$",
        ),
    ],
)  # fmt: skip
def test_an_argument_that_is_not_there_is_told_with_the_one_that_is_meant(
    make: Any, given: dict[str, Any], told: str
) -> None:
    """Before anything is asked of other ranks: there is no job."""
    first: Any = [] if make is oss.ShardedGradScaler else [MODEL.parameters() if make is oss.OSS else MODEL]
    with pytest.raises(TypeError, match=told):
        make(*first, **given)


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_is_not_here_is_told_with_what_there_is(name: str) -> None:
    with pytest.raises(ImportError) as raised:
        exec(f"from oss import {name}")
    assert str(raised.value) == NOT_HERE[name]
    assert "\n" not in NOT_HERE[name]


def test_so_are_folders_and_other_names_are_told_as_ever() -> None:
    for module in ("oss.nn", "oss.nn.model_parallel"):
        with pytest.raises(ImportError, match="FullyShardedDataParallel; for Pipe and model_parallel"):
            importlib.import_module(module)
    assert not hasattr(oss, "whatever")


def test_fairscales_arguments_raise_with_what_stands_in_their_place() -> None:
    with pytest.raises(TypeError, match=r"broadcast_fp16=True is fairscale's; gather_dtype=torch\.float16"):
        refuse_fairscales_names({"sync_start": True, "broadcast_fp16": True})
    with pytest.raises(TypeError, match=r"reduce_buffer_size=8388608 .* threshold_mb"):
        refuse_fairscales_names({"reduce_buffer_size": 2**23})
    refuse_fairscales_names({"per_parameter": True})
