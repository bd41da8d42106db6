"""Which ranks share a model: the axes data, pipeline, context and tensor of a mesh over the job."""

from __future__ import annotations

import weakref
from typing import Any

from overlap.horovod.mesh import Mesh
from overlap.job.axes import Axis, axis_of
from overlap.job.process_set import ProcessSet
from overlap.job.session import Session, current, is_initialized

__all__ = [
    "destroy_model_parallel",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_mesh",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_ranks",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "tensor_axis",
]

_meshes: weakref.WeakKeyDictionary[Session, Mesh] = weakref.WeakKeyDictionary()


def initialize_model_parallel(
    model_parallel_size_: int | Mesh,
    pipeline_length: int = 1,
    context_parallel_size: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    cp_backend: str | None = None,
    ddp_backend: str | None = None,
    timeout: Any = None,
) -> Mesh:
    """Divide the job's ranks: so many neighbours share the tensors of a model, so many its layers; the rest is data.

    On every rank, after ``init()``, before layers are made. Returns ``Mesh(data=…, pipeline=…, tensor=…)``, of which
    tensor varies fastest, as in fairscale (``fairscale.nn.model_parallel``). Instead of sizes it takes a mesh that has an
    axis ``tensor``. Called again with the same sizes, it changes nothing.

    Raises ``ValueError`` where the sizes do not divide the number of ranks, ``RuntimeError`` after a call with others, and
    ``NotImplementedError`` for a context axis, for backends of its own, and for a `timeout`.
    """
    refused = {
        "model_parallel_backend": model_parallel_backend,
        "pipeline_backend": pipeline_backend,
        "cp_backend": cp_backend,
        "ddp_backend": ddp_backend,
        "timeout": timeout,
    }
    for name, value in refused.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}={value!r}: all axes travel as init() has connected the job; leave it out, and for the time "
                "after which a job that hangs is ended see DEAR_STALL_ABORT_SECONDS"
            )
    if context_parallel_size != 1:
        raise NotImplementedError(f"context_parallel_size={context_parallel_size}: sequences are not divided; give 1")
    if isinstance(model_parallel_size_, Mesh):
        mesh = model_parallel_size_
        if "tensor" not in mesh.axes:
            raise ValueError(f"{mesh} has no axis 'tensor', among whose ranks layers divide their weights")
    else:
        mesh = Mesh(data=-1, pipeline=pipeline_length, tensor=model_parallel_size_)
    there = _meshes.get(current())
    if there is not None and there != mesh:
        raise RuntimeError(f"initialize_model_parallel() has made {there}: call destroy_model_parallel() before {mesh}")
    _meshes[current()] = mesh
    axis_of(mesh, "tensor")
    return mesh


def destroy_model_parallel() -> None:
    """Forget the mesh, so that another one may be initialized; layers that exist stay as they are. On every rank."""
    if is_initialized():
        _meshes.pop(current(), None)


def model_parallel_is_initialized() -> bool:
    """Whether :func:`initialize_model_parallel` was called in this job."""
    return is_initialized() and current() in _meshes


def get_mesh() -> Mesh:
    """The mesh. Raises ``RuntimeError`` before :func:`initialize_model_parallel`."""
    found = _meshes.get(current())
    if found is None:
        raise RuntimeError("call model_parallel.initialize_model_parallel(n) first, on every rank")
    return found


def tensor_axis() -> Axis:
    """The axis along which layers divide their weights. On every rank of the job, the first time."""
    return axis_of(get_mesh(), "tensor")


def _group(axis: str) -> ProcessSet:
    mesh = get_mesh()
    if axis not in mesh.axes:
        raise ValueError(f"{mesh} has no axis {axis!r}")
    return mesh.group(axis)


def get_model_parallel_group() -> ProcessSet:
    """The ranks that share tensors with this one. On every rank of the job, the first time, as all of these."""
    return _group("tensor")


def get_data_parallel_group() -> ProcessSet:
    """The ranks that train the same tensors on other data: the `process_set` of a ``DistributedOptimizer``."""
    return _group("data")


def get_pipeline_parallel_group() -> ProcessSet:
    """The ranks that have the other layers of this rank's pipeline."""
    return _group("pipeline")


def get_pipeline_parallel_ranks() -> list[int]:
    """These ranks of the job, in the order of the layers."""
    return list(get_mesh().ranks("pipeline"))


def get_model_parallel_world_size() -> int:
    """The number of ranks that share tensors."""
    return get_mesh().size("tensor")


def get_model_parallel_rank() -> int:
    """This rank's number among them."""
    return get_mesh().coordinate["tensor"]


def get_model_parallel_src_rank() -> int:
    """The first of them, by its rank in the job."""
    return get_mesh().ranks("tensor")[0]


def get_data_parallel_world_size() -> int:
    """The number of ranks along the data axis."""
    return get_mesh().size("data")


def get_data_parallel_rank() -> int:
    """This rank's number along the data axis."""
    return get_mesh().coordinate["data"]
