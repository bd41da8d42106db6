"""Every name of ``horovod.torch``, with its arguments, their order and defaults, from every strategy's package."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

import overlap.api
from tests.harness import ROOT
from tests.test_layering import STRATEGIES

# As horovod.torch has them; defaults that are objects by their names here.
_SET = "process_set=global_process_set"
_FACTORS = "prescale_factor=1.0, postscale_factor=1.0"
_REDUCE = f"average=None, name=None, op=None, {_FACTORS}, {_SET}"
_REDUCE_COMPRESSED = f"average=None, name=None, compression=Compression.none, op=None, {_FACTORS}, {_SET}"
EXPECTED = {
    "allgather": f"(tensor, name=None, {_SET})",
    "allgather_async": f"(tensor, name=None, {_SET})",
    "allgather_object": "(obj, name=None)",
    "allreduce": f"(tensor, {_REDUCE_COMPRESSED})",
    "allreduce_": f"(tensor, {_REDUCE})",
    "allreduce_async": f"(tensor, {_REDUCE})",
    "allreduce_async_": f"(tensor, {_REDUCE})",
    "alltoall": f"(tensor, splits=None, name=None, {_SET})",
    "alltoall_async": f"(tensor, splits=None, name=None, {_SET})",
    "ProcessSet": "(ranks_or_comm)",
    "add_process_set": "(process_set)",
    "barrier": f"({_SET})",
    "broadcast": f"(tensor, root_rank, name=None, {_SET})",
    "broadcast_": f"(tensor, root_rank, name=None, {_SET})",
    "broadcast_async": f"(tensor, root_rank, name=None, {_SET})",
    "broadcast_async_": f"(tensor, root_rank, name=None, {_SET})",
    "broadcast_object": f"(obj, root_rank=0, name=None, {_SET})",
    "broadcast_optimizer_state": "(optimizer, root_rank, model=None)",
    "broadcast_parameters": "(params, root_rank)",
    "ccl_built": "()",
    "cross_rank": "()",
    "cross_size": "()",
    "cuda_built": "()",
    "ddl_built": "()",
    "gloo_built": "()",
    "gloo_enabled": "()",
    "grouped_allgather": f"(tensors, name=None, {_SET})",
    "grouped_allgather_async": f"(tensors, name=None, {_SET})",
    "grouped_allreduce": f"(tensors, {_REDUCE_COMPRESSED})",
    "grouped_allreduce_": f"(tensors, {_REDUCE})",
    "grouped_allreduce_async": f"(tensors, {_REDUCE})",
    "grouped_allreduce_async_": f"(tensors, {_REDUCE})",
    "grouped_reducescatter": f"(tensors, name=None, compression=Compression.none, op=Average, {_SET}, {_FACTORS})",
    "grouped_reducescatter_async": f"(tensors, name=None, op=Average, {_SET}, {_FACTORS})",
    "is_homogeneous": "()",
    "is_initialized": "()",
    "join": "(device=-1)",
    "local_rank": "()",
    "local_size": "()",
    "mpi_built": "()",
    "mpi_enabled": "()",
    "mpi_threads_supported": "()",
    "nccl_built": "()",
    "poll": "(handle)",
    "rank": "()",
    "reducescatter": f"(tensor, name=None, compression=Compression.none, op=Average, {_SET}, {_FACTORS})",
    "reducescatter_async": f"(tensor, name=None, op=Average, {_SET}, {_FACTORS})",
    "remove_process_set": "(process_set)",
    "rocm_built": "()",
    "shutdown": "()",
    "size": "()",
    "sparse_allreduce_async": f"(tensor, name, op, {_SET})",
    "start_timeline": "(file_path, mark_cycles=False, *, max_mb=None)",  # ours: max_mb
    "stop_timeline": "()",
    "synchronize": "(handle)",
}
OPTIMIZER = (
    "(optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, op=Average, "
    "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=global_process_set)"
)
BATCH_NORM = "(num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)"
ELASTIC = {
    "ElasticSampler": "(dataset, shuffle=True, seed=0)",
    "run": "(func)",
}
VALUES = {
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "ProcessSet",
    "Sum",
    "compression",
    "global_process_set",
}
PACKAGES = [name for name in STRATEGIES if (ROOT / name / "__init__.py").exists()]


def _shown(function: Any, last: str = "") -> str:
    """A signature, as far as the argument `last`, without annotations, defaults as a script would write them."""
    parameters = list(inspect.signature(function).parameters.values())
    if last:
        parameters = parameters[: [parameter.name for parameter in parameters].index(last) + 1]
    names = {
        id(overlap.api.Average): "Average",
        id(overlap.api.global_process_set): "global_process_set",
        id(overlap.api.Compression.none): "Compression.none",
    }
    parts: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = parameter.default
        shown = "" if default is parameter.empty else f"={names.get(id(default), repr(default))}"
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        parts.append(f"{stars}{parameter.name}{shown}")
    return f"({', '.join(parts)})"


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", EXPECTED)
def test_signatures(package: str, name: str) -> None:
    assert _shown(getattr(importlib.import_module(package), name)) == EXPECTED[name]


@pytest.mark.parametrize("package", PACKAGES)
def test_what_has_arguments_of_our_own_has_horovods_first(package: str) -> None:
    module = importlib.import_module(package)
    assert _shown(module.init, "process_sets") == "(comm=None, process_sets=None)"
    assert _shown(module.DistributedOptimizer, "process_set") == OPTIMIZER
    assert _shown(module.SyncBatchNorm, "track_running_stats") == BATCH_NORM
    for name, signature in ELASTIC.items():
        assert _shown(getattr(module.elastic, name)) == signature, name
    assert _shown(module.elastic.TorchState, "optimizer") == "(model=None, optimizer=None)"
    assert issubclass(module.elastic.TorchState, module.elastic.State)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_strategy_has_the_same_facade_and_an_optimizer_of_its_own(package: str) -> None:
    module = importlib.import_module(package)
    assert set(overlap.api.__all__) | {"DistributedOptimizer"} <= set(module.__all__)
    for name in overlap.api.__all__:
        assert getattr(module, name) is getattr(overlap.api, name)
    assert set(module.__all__) >= VALUES
    assert module.DistributedOptimizer.__module__.startswith(package)


def test_every_function_says_what_it_does() -> None:
    undocumented = [name for name in overlap.api.__all__ if not inspect.getdoc(getattr(overlap.api, name))]
    assert undocumented == []


def test_compressors_have_two_static_methods() -> None:
    for name in ("none", "fp16", "bf16"):
        compressor = getattr(overlap.api.Compression, name)
        assert isinstance(inspect.getattr_static(compressor, "compress"), staticmethod)
        assert isinstance(inspect.getattr_static(compressor, "decompress"), staticmethod)


@pytest.mark.parametrize("name", ["rank", "size", "local_rank", "cross_size", "is_homogeneous", "barrier", "join"])
def test_before_init_everything_says_so(name: str) -> None:
    assert not overlap.api.is_initialized()
    with pytest.raises(ValueError, match=r"^call \w+\.init\(\) first") as caught:
        getattr(overlap.api, name)()
    assert isinstance(caught.value, overlap.api.HorovodInternalError)


@pytest.mark.parametrize("package", [name for name in STRATEGIES if (ROOT / name).is_dir()])
def test_wrapping_before_init_says_so(package: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^call \w+\.init\(\) first"):
        importlib.import_module(package).DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
