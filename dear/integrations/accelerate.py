"""An ``Accelerator`` for Hugging Face Accelerate that averages gradients with dear: only the import changes.

from dear.integrations.accelerate import Accelerator

Accelerate keeps what is its own: processes, devices, data loaders, precision, accumulation, schedulers, checkpoints. It
puts no DistributedDataParallel around models; optimizers are distributed by dear instead.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType
from torch.optim.optimizer import register_optimizer_step_pre_hook

import dear
from dear.integrations.options import checked
from overlap.job.launch import Launcher, detect
from overlap.job.session import current
from overlap.optimizer.distributed import DistributedOptimizer

__all__ = ["Accelerator", "DearOptimizer", "refuse_other_ways", "take_over"]

_OTHERS = {
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
_PLUGINS = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
}
_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
_SIZES = ("tp_size", "cp_size", "sp_size", "dp_shard_size")


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` whose optimizers average gradients by dear, each rank with 1/P of their state.

    Args:
        args, kwargs: those of ``accelerate.Accelerator``. On a machine without GPUs, `cpu` is True in a job of several
            ranks, without which Accelerate would have each of them train alone.
        dear_options: arguments of :func:`dear.DistributedOptimizer`, for every optimizer: ``{"threshold_mb": 4}``.

    Calls ``dear.init()``. On every rank. Raises ``ValueError`` for what trains in another way (FSDP, DeepSpeed, tensor
    parallelism, communication hooks of DDP), ``TypeError`` for options that there are not, and ``RuntimeError`` where
    Accelerate and dear see different jobs.
    """

    _collects = True  # this rank, for a checkpoint that is being written

    def __init__(self, *args: Any, dear_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        options = checked(dear_options)
        given = inspect.signature(accelerate.Accelerator).bind(*args, **kwargs).arguments
        refuse_other_ways(given)
        if not torch.cuda.is_available():
            dear.init()
            given["cpu"] = given.get("cpu", False) or dear.size() > 1
        elif detect(os.environ).launcher is not Launcher.TORCHRUN:  # whose ranks get NCCL's group from Accelerate
            dear.init()
        super().__init__(**given)
        dear.init()
        _take_charge(self, options)

    # - Preparing

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare objects, in any order, as Accelerate does; models come first, as optimizers are wrapped with them."""
        for model in args:
            if isinstance(model, torch.nn.Module):
                _refuse_split(model)
        order = sorted(range(len(args)), key=lambda place: not isinstance(args[place], torch.nn.Module))
        given = None if device_placement is None else [device_placement[place] for place in order]
        prepared = super().prepare(*(args[place] for place in order), device_placement=given)
        if len(args) < 2:
            return prepared
        found = dict(zip(order, prepared, strict=True))
        return tuple(found[place] for place in range(len(args)))

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """As in Accelerate, without DistributedDataParallel. Raises ``ValueError`` for a model split over devices."""
        _refuse_split(model)
        # What Accelerate calls an evaluation has all but the wrapper for distributed training.
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Distribute `optimizer`, with the prepared models whose parameters it has. On every rank."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if isinstance(optimizer, DistributedOptimizer):
            raise TypeError(
                "prepare() was given a dear.DistributedOptimizer, and this Accelerator makes it: hand over the optimizer "
                "inside, and give its options as Accelerator(dear_options={…})"
            )
        if type(optimizer).__name__ in ("Lomo", "AdaLomo"):
            raise ValueError(
                f"{type(optimizer).__name__} updates parameters inside backward, before dear can average their gradients: "
                "take another optimizer"
            )
        plain = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
        members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models = [model for model in plain if any(id(parameter) in members for parameter in model.parameters())]
        whole = models[0] if len(models) == 1 else torch.nn.ModuleList(models) if models else None
        if whole is None and self._sharded:
            raise ValueError(
                f"prepare() was given {type(optimizer).__name__} and no model with its parameters, and strategy 'fsdp' "
                "shards the model: prepare the model together with its optimizer, or before it"
            )
        distributed = dear.DistributedOptimizer(optimizer, whole, **self._dear_options)
        placed = self.device_placement if device_placement is None else device_placement
        prepared = DearOptimizer(distributed, models, device_placement=placed, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As in Accelerate. It was made with the optimizer that is inside the distributed one now."""
        prepared = super().prepare_scheduler(scheduler)
        if prepared is not scheduler:
            mine = [optimizer for optimizer in self._optimizers if optimizer.optimizer.wraps(scheduler.optimizer)]
            prepared.optimizers = mine or prepared.optimizers
        return prepared

    # - Training

    @property
    def _sharded(self) -> bool:
        """Whether each rank keeps a share of the parameters."""
        return self._dear_options.get("strategy") == "fsdp"

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As in Accelerate. Gradients of a pass that no ``step()`` follows, while it accumulates, stay this rank's own."""
        with contextlib.ExitStack() as stack:
            for optimizer in () if self.sync_gradients else self._optimizers:
                stack.enter_context(optimizer.optimizer.no_sync())
            super().backward(loss, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Backward passes inside accumulate locally, in all optimizers that have parameters of `model`."""
        # Not found by model.parameters(): who looks at them waits for what the last step has sent.
        plain = self.unwrap_model(model, keep_torch_compile=False)
        with contextlib.ExitStack() as stack:
            for optimizer in self._optimizers:
                if optimizer.trains(plain):
                    stack.enter_context(optimizer.optimizer.no_sync())
            yield

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        """As in Accelerate, by the norm of the averages. On every rank."""
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # Without those that are frozen, which no optimizer has: what one has alone is clipped where it lies.
        chosen = [parameter for parameter in chosen if parameter.requires_grad or parameter.grad is not None]
        return super().clip_grad_norm_(chosen, max_norm, norm_type=norm_type)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """As in Accelerate, on CPUs too: ranks that run out of data take part in what the others do, by ``dear.join()``.

        Averages divide by the ranks that still have data, where DistributedDataParallel's divide by all.
        """
        samplers = [loader.batch_sampler for loader in self._dataloaders if hasattr(loader, "batch_sampler")]
        before = [(sampler, sampler.even_batches) for sampler in samplers if hasattr(sampler, "even_batches")]
        even = self.even_batches if even_batches is None else even_batches
        try:
            for sampler, value in before:
                sampler.even_batches = value if even_batches is None else even_batches
            yield
            if not even:
                dear.join()
        finally:
            for sampler, value in before:
                sampler.even_batches = value

    # - Checkpoints

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
        """The model's state dict as in Accelerate, in tensors that can be written as safetensors.

        Of a sharded model too it is whole, on each rank that asks.
        """
        if not self._collects:
            return {}
        return _apart(super().get_state_dict(model, unwrap=unwrap))

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate, on every rank. Where models are sharded, ranks that do not write collect nothing."""
        with self._collecting_where_it_is_written():
            return super().save_state(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As in Accelerate, on every rank. Where models are sharded, ranks that do not write collect nothing."""
        with self._collecting_where_it_is_written():
            super().save_model(*args, **kwargs)

    @contextlib.contextmanager
    def _collecting_where_it_is_written(self) -> Iterator[None]:
        each_node = self.project_configuration.save_on_each_node
        writes = self.is_local_main_process if each_node else self.is_main_process
        parts: list[Any] = [
            self,
            *(optimizer for optimizer in self._optimizers if isinstance(optimizer, DearOptimizer)),
        ]
        for part in parts:
            part._collects = writes or not self._sharded
        try:
            yield
        finally:
            for part in parts:
                part._collects = True

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """As in Accelerate."""
        super().save(_apart(obj) if safe_serialization else obj, f, safe_serialization=safe_serialization)


class DearOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper around a distributed optimizer, and the models it trains."""

    _collects = True

    def __init__(
        self, optimizer: DistributedOptimizer, models: Sequence[torch.nn.Module], *, device_placement: bool, scaler: Any
    ) -> None:
        super().__init__(optimizer, device_placement=device_placement, scaler=scaler)
        self._models = weakref.WeakSet(models)
        if scaler is not None:
            self._optimizer_patched_step_method = self._noting(optimizer.step)

    def trains(self, model: torch.nn.Module) -> bool:
        """Whether this optimizer has parameters of `model`; models that were prepared after it are not known to it."""
        return not self._models or model in self._models

    def state_dict(self) -> dict[str, Any]:
        """The whole state; empty on a rank that does not write the checkpoint for which Accelerate asks."""
        return super().state_dict() if self._collects else {}

    def _noting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, which a GradScaler always calls: what it found on all ranks decides there whether it is skipped."""

        def noting(*args: Any, **kwargs: Any) -> Any:
            found = vars(self.optimizer).get("found_inf")
            self._accelerate_step_called = found is None or not bool(found > 0)
            return step(*args, **kwargs)

        return noting


def _apart(state: Any) -> Any:
    """A copy of `state` with a memory of its own for each tensor; tied ones stay tied.

    dear's parameters lie side by side in buckets. Accelerate takes what shares a memory for one parameter under several
    names, and writes the first one to safetensors alone.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    state = copy.copy(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            place = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if place not in copies:
                copies[place] = value.clone()
            state[name] = copies[place]
    return state


def take_over(accelerator: Any, options: Mapping[str, Any]) -> None:
    """Turn an ``accelerate.Accelerator`` that a library has made into this module's :class:`Accelerator`.

    On every rank.
    """
    if not isinstance(accelerator, Accelerator):
        accelerator.__class__ = type("Accelerator", (Accelerator, type(accelerator)), {})
    _take_charge(accelerator, options)


def _take_charge(accelerator: Any, options: Mapping[str, Any]) -> None:
    """Check what it has found, and watch over the optimizers of its models."""
    other = _OTHERS.get(accelerator.distributed_type)
    if other is not None:
        raise ValueError(_both(other))
    theirs, ours = (accelerator.process_index, accelerator.num_processes), (dear.rank(), dear.size())
    if theirs != ours:
        raise RuntimeError(
            f"Accelerate makes this process number {theirs[0]} of {theirs[1]}, and dear number {ours[0]} of {ours[1]}: "
            "call dear.init() before anything of Accelerate's or Trainer's is made, and on a machine without GPUs give "
            "Accelerator(cpu=True) or TrainingArguments(use_cpu=True)"
        )
    options = dict(options)
    handler = accelerator.ddp_handler
    if handler is not None:
        _refuse_hooks(handler)
        options.setdefault("broadcast_buffers", handler.broadcast_buffers)
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        raise ValueError(
            "sync_each_batch=True reduces gradients in every pass, and dear once for each step: leave it out"
        )
    accelerator._dear_options = options
    _watch(accelerator)


def refuse_other_ways(given: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where arguments of Accelerate's, or its environment variables, ask for another way to train."""
    for name, what in _PLUGINS.items():
        if given.get(name) is not None:
            raise ValueError(_both(f"{what} ({name})"))
    for name, what in _VARIABLES.items():
        if os.environ.get(name, "false").lower() == "true":
            raise ValueError(_both(f"{what} ({name}=true, as accelerate launch sets it)"))
    config = given.get("parallelism_config")
    for size in _SIZES:
        if config is not None and (getattr(config, size, 1) or 1) > 1:
            raise ValueError(_both(f"parallelism_config with {size}={getattr(config, size)}"))


def _refuse_hooks(handler: DistributedDataParallelKwargs) -> None:
    no = DDPCommunicationHookType.NO
    if handler.comm_hook != no or handler.comm_wrapper != no:
        raise ValueError(
            f"DistributedDataParallelKwargs has comm_hook={handler.comm_hook} and comm_wrapper={handler.comm_wrapper}, and "
            "dear puts no DistributedDataParallel around models: give dear_options={'compression': dear.Compression.bf16}"
        )
    if handler.bucket_cap_mb != DistributedDataParallelKwargs().bucket_cap_mb:
        raise ValueError(
            f"bucket_cap_mb={handler.bucket_cap_mb} is for DistributedDataParallel, and dear has buckets of its own: give "
            f"dear_options={{'threshold_mb': {handler.bucket_cap_mb}}}"
        )


def _refuse_split(model: torch.nn.Module) -> None:
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise ValueError(_both(f"a model whose device_map spreads it over {len(devices)} devices"))
    if getattr(model, "is_distributed_loading_by_transformers", False) or (getattr(model, "tp_size", None) or 1) > 1:
        raise ValueError(_both("a model that transformers has sharded (tensor parallelism, distributed_config)"))


def _both(other: str) -> str:
    return f"{other} and dear both decide how gradients and state are spread over ranks: use one of them"


_watched: weakref.WeakSet[Accelerator] = weakref.WeakSet()
_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _watch(accelerator: Accelerator) -> None:
    """From now on an optimizer that was not prepared, and steps a prepared model's parameters, raises ``RuntimeError``.

    DistributedDataParallel would have averaged its gradients; here each rank would train alone, unnoticed.
    """
    _watched.add(accelerator)
    _install()


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_refuse_unprepared)


def _refuse_unprepared(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if optimizer in _seen or not dear.is_initialized() or dear.size() == 1:
        return
    if not isinstance(optimizer, DistributedOptimizer) and current().registry.shell_of(optimizer) is optimizer:
        models = [model for accelerator in _watched for model in accelerator._models]
        prepared = {id(parameter) for model in models for parameter in model.parameters()}
        if any(id(parameter) in prepared for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError(
                f"step() of the {type(optimizer).__name__} was called, which has parameters of a prepared model and was "
                "not prepared: its gradients are this rank's own. Give it to accelerator.prepare() too"
            )
    _seen.add(optimizer)
