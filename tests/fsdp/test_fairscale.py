"""fairscale's names in `fsdp`: what is documented, what is refused, and what is decided without a job."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import fsdp
from fsdp.groups import _why_not
from fsdp.local_state import _way
from fsdp.names import LEVEL, NOT_HERE, Told, cleaned, move_down, move_up
from tests.harness import ROOT

#: The constructor's, in fairscale 0.4.13's order, but for the module.
FAIRSCALES = [
    "process_group",
    "process_group_reduce_scatter",
    "reshard_after_forward",
    "disable_reshard_on_root",
    "mixed_precision",
    "fp32_reduce_scatter",
    "flatten_parameters",
    "move_params_to_cpu",
    "compute_dtype",
    "buffer_dtype",
    "move_grads_to_cpu",
    "bucket_cap_mb",
    "compute_device",
    "no_broadcast_optim_state",
    "state_dict_device",
    "clear_autocast_cache",
    "force_input_to_fp32",
    "verbose",
    "cpu_offload",
    "state_dict_on_rank_0_only",
    "gradient_predivide_factor",
    "allow_reset_parameters",
]
METHODS = [
    "module",
    "clip_grad_norm_",
    "no_sync",
    "summon_full_params",
    "state_dict",
    "load_state_dict",
    "local_state_dict",
    "load_local_state_dict",
    "local_metadata_dict",
    "consolidate_shard_weights",
    "gather_full_optim_state_dict",
    "get_shard_from_optim_state_dict",
    "append_shared_param",
    "set_gradient_divide_factors",
    "apply",
    "reset_parameters",
    "params_with_grad",
]


def test_the_constructor_takes_what_fairscales_takes_in_its_order() -> None:
    taken = list(inspect.signature(fsdp.FullyShardedDataParallel).parameters)
    assert taken == ["module", *FAIRSCALES, "mesh", "two_level"]


def test_all_of_it_is_in_one_table_and_all_methods_in_another() -> None:
    page = (ROOT / "docs" / "fairscale.md").read_text()
    section = page.split("\n## FullyShardedDataParallel\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)[^`]*`", row)]
    for name in (*FAIRSCALES, "mesh", "two_level", *METHODS):
        assert named.count(name) == 1, name
    assert all(hasattr(fsdp.FullyShardedDataParallel, name) for name in METHODS)


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_is_not_here_is_told_with_what_there_is(name: str) -> None:
    with pytest.raises(ImportError) as raised:
        exec(f"from fsdp import {name}")
    assert str(raised.value) == NOT_HERE[name]
    assert not hasattr(fsdp, "whatever")


def test_names_lose_the_levels_of_wrappers_and_get_them_back() -> None:
    found: Any = dict.fromkeys(("before", f"a.{LEVEL}.w", f"a.{LEVEL}.b.c"))
    move_up(found, "a.")
    assert list(found) == ["before", "a.w", "a.b.c"]
    move_down(found, "a.")
    assert list(found) == ["before", f"a.{LEVEL}.w", f"a.{LEVEL}.b.c"]
    assert cleaned(f"a.{LEVEL}.b.{LEVEL}") == "a.b"
    assert Told({"a.b": 1, "": 2}).get(f"a.{LEVEL}.b") == 1
    assert Told({"a.b": 1, "": 2}).get(LEVEL) == 2


@pytest.mark.parametrize(
    ("nnodes", "each", "hosts", "words"),
    [
        (2, 2, [0, 0, 1, 1], None),
        (2, 2, [0, 0, 0, 0], None),  # one machine stands for two
        (1, 4, [0, 0, 0, 0], None),
        (4, 1, [0, 0, 1, 1], None),  # parts of hosts
        (2, 2, [0, 1, 0, 1], "ranks 0 to 1 should be on one host and are on 2"),
        (1, 4, [0, 0, 1, 1], "ranks 0 to 3 should be on one host"),
        (2, 4, [0, 0, 1, 1], "2 × 4 is 8; give numbers whose product is 4"),
        (-2, -2, [0, 0, 1, 1], "product is 4"),
    ],
)
def test_hosts_and_ranks_have_to_fit_the_job(nnodes: int, each: int, hosts: list[int], words: str | None) -> None:
    found = _why_not(nnodes, each, hosts)
    assert found is None if words is None else words in str(found)


def test_sizes_decide() -> None:
    line = torch.nn.Linear(10, 10)
    asked = {"module": line, "recurse": False}
    assert not fsdp.default_auto_wrap_policy(**asked, unwrapped_params=10**8 - 1)
    assert fsdp.default_auto_wrap_policy(**asked, unwrapped_params=10**8)
    small = {"unwrapped_params": 5, "min_num_params": 6}
    assert not fsdp.default_auto_wrap_policy(**asked, **small, module_is_root=True)
    assert fsdp.default_auto_wrap_policy(**asked, **small, module_is_root=True, skip_params_check_for_root=True)
    large = {"unwrapped_params": 6, "min_num_params": 6}
    for kind in (torch.nn.ModuleList, torch.nn.ModuleDict):
        assert not fsdp.default_auto_wrap_policy(kind(), recurse=False, **large)
        assert fsdp.default_auto_wrap_policy(kind(), recurse=True, **large)
    assert not fsdp.default_auto_wrap_policy(torch.nn.MultiheadAttention(2, 1), recurse=True, **large)
    assert not fsdp.default_auto_wrap_policy(line, recurse=True, **large, force_leaf_modules={torch.nn.Linear})
    assert not fsdp.default_auto_wrap_policy(line, recurse=False, **large, exclude_wrap_modules={torch.nn.Linear})


def test_shards_are_joined_in_the_order_of_their_elements_and_dimensions() -> None:
    """Of a tensor whose second dimension varies slowest; one rank has nothing of it."""
    whole = torch.arange(6.0).reshape(2, 3)
    flat = whole.t().flatten()
    shares = [{"w": flat[4:]}, {"w": flat[:0]}, {"w": flat[:4]}]
    told = [
        {"param_metadata": {"w": {"shape": (2, 3), "start": start, "dims": (1, 0)}}, "buffer_names": []}
        for start in (4, 0, 0)
    ]
    assert torch.equal(fsdp.FSDP.consolidate_shard_weights(shares, told)["w"], whole)


def test_a_whole_tensor_is_that_of_the_first_rank() -> None:
    told = {"param_metadata": {"w": {"shape": (2,), "start": None, "dims": None}}, "buffer_names": ["b"]}
    shares = [{"w": torch.full((2,), float(rank)), "b": rank} for rank in range(2)]
    found = fsdp.FSDP.consolidate_shard_weights(shares, [told, told])
    assert found["w"].tolist() == [0, 0]
    assert found["b"] == 0


@pytest.mark.parametrize(
    ("given", "own", "way"),
    [((6, 6), (6, 6), "whole"), ((6, 6), (3, 3), "whole"), ((2, 4), (2, 4), "share"), ((2, 4), (3, 3), "apart")],
)
def test_all_ranks_load_a_tensor_in_the_same_way(given: tuple[int, ...], own: tuple[int, ...], way: str) -> None:
    assert _way("w", torch.empty(2, 3), torch.empty(6), list(zip(given, own, strict=True))) == way


def test_a_rank_alone_tells_a_share_by_its_shape() -> None:
    assert _way("w", torch.empty(2, 3), torch.empty(2, 3), [(6, 6)]) == "whole"
    assert _way("w", torch.empty(2, 3), torch.empty(6), [(6, 6)]) == "apart"


def test_shares_that_make_no_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'w' have \[2, 3\] elements on 2 rank.*it has 6"):
        _way("w", torch.empty(2, 3), torch.empty(2), [(2, 3), (3, 3)])
