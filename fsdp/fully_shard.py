"""``fully_shard``, with the names and meanings of ``torch.distributed.fsdp``, for plain torch optimizers.

    fully_shard(block) …, fully_shard(model)     notes which parameters travel together
    optimizer = AdamW(model.parameters()) …      before or after that
    model(x), the first time gradients can come  finds its optimizers, and shards all, as `fsdp.DistributedOptimizer` does

Until then the model is whole, and can be loaded, converted and evaluated like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp.first_pass import WIRES
from fsdp.module import as_type, compiled_calls, sharded_class
from fsdp.units import Unit, has_unit, register, taken
from overlap.horovod.mesh import Mesh
from overlap.job.session import current

__all__ = ["fully_shard"]

_Modules = TypeVar("_Modules", torch.nn.Module, list[torch.nn.Module])


def fully_shard(
    module: _Modules,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[torch.nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    elementwise: bool | None = None,
    per_parameter: bool | None = None,
) -> _Modules:
    """Shard the parameters of `module` that no earlier call has taken: of blocks first and of the model last, as in torch.

    They are gathered together. Those that only the outermost module has are divided by the order of their use, so that one
    call for the whole model hides its communication, too. The module's class gets the methods of :class:`FSDPModule`.

    Args:
        module: a module, or several that are gathered together. It is returned.
        mesh: the ranks among which parameters are sharded, the same for all modules of a model: a ``dear.Mesh`` or torch's
            ``DeviceMesh`` of one dimension, or one axis of either, as ``mesh["data"]``. None: all ranks. With two
            axes, they are sharded along the second one, and gradients are averaged along both (hybrid sharding).
        reshard_after_forward: True frees whole parameters after forward and gathers them again for backward; False keeps
            them until backward has used them; None leaves it to the plan, which keeps what backward needs first. An int is
            the number of neighbouring ranks among which they are sharded meanwhile, and gathered for backward, a divisor of
            the number of all: 1 is False, and all of them True. One number for all modules of a model that have one.
        shard_placement_fn: refused, as is `dp_mesh_dims`.
        mp_policy: ``param_dtype``, bfloat16 or float16: parameters are gathered and used as that, and with
            ``cast_forward_inputs`` floating-point tensors that forward is called with become it, once the model is sharded.
            Shards, the optimizer and state dicts have the parameters' own type. ``reduce_dtype`` is what gradients travel
            in, summed in fp32; None: ``param_dtype``. ``output_dtype``: what the module returns.
        offload_policy: with ``CPUOffloadPolicy()``, the same for all modules of a model, shards of a model on a GPU, and
            the optimizer's state, are in the CPU's memory, pinned, and the optimizer updates there. The model is on the GPU
            when it is sharded. Not run on a GPU yet. Of models on CPUs they are there as it is.
        ignored_params: frozen parameters, which stay whole.
        elementwise: this and `per_parameter`, which torch has not, promise something about the model's optimizer, of a type
            that is not known: :class:`overlap.optimizer.arguments.SharedArguments`. One module of a model may be told.

    On every rank with the same modules, after ``fsdp.init()``; ranks that `mesh` sets apart may have others. All ranks of
    the job begin their first training pass together: those that wait for another rank's output before it, as in a
    pipeline, take ``fsdp.DistributedOptimizer``. Raises ``ValueError`` for what torch refuses, too, and
    ``NotImplementedError`` for what torch has and this has not.
    """
    groups, by_default_group = _groups_of(mesh)
    size = len(groups[0])
    modules: Sequence[torch.nn.Module] = module if isinstance(module, list) else [module]
    _refuse_modules(modules)
    _refuse_layout(shard_placement_fn, dp_mesh_dims, size)
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    offload = _offloads(offload_policy)
    others = taken() | _ignored(ignored_params)
    found = {id(each): each for one in modules for each in one.parameters() if id(each) not in others}
    mine, after_forward = list(found.values()), _after_forward(reshard_after_forward, size)
    _refuse_types(policy, mine)
    for one in modules:
        kind: Any = type(one)
        casts = policy.param_dtype is not None and policy.cast_forward_inputs
        types = policy.reduce_dtype, policy.param_dtype
        wrapped = Unit(
            kind, mine, groups, by_default_group, *after_forward, *types, offload, casts, elementwise, per_parameter
        )
        register(one, wrapped)
        one.__class__ = sharded_class(kind)
        if policy.output_dtype is not None:
            one.register_forward_hook(functools.partial(_cast, policy.output_dtype))
        mine = []  # the first one has them
    compiled_calls().watch(modules)
    return module


def _offloads(policy: OffloadPolicy | None) -> bool:
    if not isinstance(policy, CPUOffloadPolicy):
        if isinstance(policy, OffloadPolicy | None):
            return False
        raise TypeError(f"offload_policy should be a CPUOffloadPolicy, an OffloadPolicy or None and is {policy!r}")
    if not policy.pin_memory:
        raise NotImplementedError(
            "offload_policy=CPUOffloadPolicy(pin_memory=False): the host would wait for each copy; leave pin_memory=True"
        )
    return True


def _cast(dtype: torch.dtype, _module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
    return as_type(dtype, output)


def _after_forward(reshard: bool | int | None, size: int) -> tuple[bool | None, int | None]:
    """Whether parameters stay whole until backward, and among how many of `size` ranks they are sharded otherwise."""
    if reshard is None or isinstance(reshard, bool):
        return None if reshard is None else not reshard, None
    if not isinstance(reshard, int) or reshard < 1 or size % reshard:
        raise ValueError(
            f"reshard_after_forward={reshard!r} does not divide the {size} ranks that shard parameters: give a divisor of "
            f"{size}, True or False"
        )
    return reshard == 1 < size, reshard if 1 < reshard < size else None


def _ignored(parameters: Collection[torch.nn.Parameter] | None) -> set[int]:
    trained = [each for each in parameters or () if each.requires_grad]
    if trained:
        raise NotImplementedError(
            f"ignored_params holds {len(trained)} parameters that each rank would train by itself: freeze them, or leave "
            "ignored_params out"
        )
    return set(map(id, parameters or ()))


def _refuse_modules(modules: Sequence[Any]) -> None:
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise ValueError(f"fully_shard() takes a module or a list of modules, and was given {module!r}")
        if has_unit(module):
            raise ValueError(f"{type(module).__name__} was given to fully_shard() before")
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
            raise ValueError(f"{type(module).__name__} has no forward(): give fully_shard() the modules in it")


def _groups_of(mesh: Any) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """The groups of ranks within each of which `mesh` shards, and whether these are of torch.distributed's default group.

    Else they are the job's: without a mesh, a single group of all ranks.
    """
    if mesh is None:
        return (tuple(range(current().comm.size)),), False
    if isinstance(mesh, tuple):  # groups of ranks of the job, from `FullyShardedDataParallel`
        return mesh, False
    shape = tuple(mesh.shape.values()) if isinstance(mesh, Mesh) else tuple(mesh.mesh.shape)
    if len(shape) not in (1, 2):
        raise ValueError(
            f"mesh has the shape {shape}: parameters are sharded along one axis, and may be replicated along another; give "
            "these, as mesh['data'] or mesh['replicate', 'shard']"
        )
    if isinstance(mesh, Mesh):
        return mesh.parts(tuple(mesh.shape)[-1]), False
    return tuple(tuple(sorted(row)) for row in mesh.mesh.reshape(-1, shape[-1]).tolist()), True


def _refuse_layout(placement: Any, dims: Any, size: int) -> None:
    if placement is not None or dims is not None:
        name = "dp_mesh_dims" if placement is None else "shard_placement_fn"
        raise NotImplementedError(f"{name}: a rank's share is 1/{size} of each bucket, laid out flat; leave it out")


def _refuse_types(policy: MixedPrecisionPolicy, parameters: Sequence[torch.Tensor]) -> None:
    types = {each.dtype for each in parameters if each.is_floating_point()}
    others = types - {policy.param_dtype}
    if policy.param_dtype is not None and others:
        if policy.param_dtype not in (torch.bfloat16, torch.float16) or others - {torch.float32, torch.float64}:
            raise NotImplementedError(
                f"param_dtype is {policy.param_dtype}, and parameters are {others.pop()}: parameters of float32 or float64 "
                "may be used as bfloat16 or float16; else convert the model"
            )
        if not hasattr(torch.Tensor, "grad_dtype"):
            raise NotImplementedError(
                f"param_dtype is {policy.param_dtype}, which needs Tensor.grad_dtype, and torch {torch.__version__} has "
                "none: use a newer one, or compute in 16 bits inside torch.autocast"
            )
    if policy.reduce_dtype not in WIRES:
        raise NotImplementedError(
            f"reduce_dtype is {policy.reduce_dtype}: gradients travel in their own type, bfloat16 or float16"
        )
    if policy.reduce_dtype in (torch.float32, torch.float64) and types - {policy.reduce_dtype}:
        raise NotImplementedError(
            f"reduce_dtype is {policy.reduce_dtype}, and gradients are {types.pop()}: leave it out; those of 16 bits are "
            "summed in fp32"
        )
