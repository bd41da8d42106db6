"""Lightning's Trainer and Fabric over dear: importing this file registers ``strategy="dear"`` and its siblings.

    import dear.integrations.lightning
    trainer = lightning.Trainer(strategy="dear", devices=2)  # or "dear_oss", "dear_co2", …

Lightning runs the loop, and DDP's strategy in it everything that is not about gradients; this file gives each optimizer to
``dear.DistributedOptimizer`` instead of the model to ``DistributedDataParallel``. Collectives that are not about gradients
(metrics, checkpoints, decisions) go over the default group of torch.distributed, as with DDP.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from types import MethodType
from typing import Any

import torch

from dear.integrations.lightning_environment import (
    FABRIC,
    PYTORCH,
    DearEnvironment,
    check_processes,
    environment_of,
    launcher,
)
from dear.integrations.options import STRATEGIES, checked
from dear.optimizer import DistributedOptimizer
from overlap.api import broadcast_parameters, init
from overlap.job.launch import Launcher
from overlap.job.session import current
from overlap.optimizer.arguments import check_kinds
from overlap.optimizer.distributed import DistributedOptimizer as Shell

__all__ = ["NAMES", "DearEnvironment", "DearFabricStrategy", "DearStrategy"]

_pytorch: Any = importlib.import_module(PYTORCH)
_TrainerDDP: Any = importlib.import_module(f"{PYTORCH}.strategies").DDPStrategy
_FabricDDP: Any = importlib.import_module(f"{FABRIC}.strategies").DDPStrategy
_BackwardSyncControl: Any = importlib.import_module(f"{FABRIC}.strategies.strategy")._BackwardSyncControl
_no_closure: Any = importlib.import_module(f"{PYTORCH}.core.optimizer").do_nothing_closure
_Mixin: Any = object

#: What Lightning's users write, and the package whose ``DistributedOptimizer`` that means.
NAMES = {"dear" if name == "dear" else f"dear_{name}": name for name in (*STRATEGIES, "co2")}

_callbacks: Any = importlib.import_module(f"{PYTORCH}.callbacks")
#: Callbacks that keep averages of all parameters; older versions of Lightning have one of them.
_AVERAGING = tuple(
    getattr(_callbacks, name) for name in ("WeightAveraging", "StochasticWeightAveraging") if hasattr(_callbacks, name)
)

_TIMEOUT = timedelta(minutes=30)  # Lightning's own
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's, of names in a module that DDP does not touch


class _Job(_Mixin):
    """What the two strategies share: the job's ranks, and optimizers that are given to dear."""

    def __init__(self, strategy: str, options: Mapping[str, Any], plugins: Mapping[str, Any]) -> None:
        self._wanted = checked({"strategy": strategy, **options}, type(self).__name__, averages=True)
        check_kinds(self._wanted)
        environment = plugins["cluster_environment"] or environment_of()
        super().__init__(**{**plugins, "cluster_environment": environment})

    def _configure_launcher(self) -> None:
        """Before anything is started: Lightning would find ranks missing by waiting for them."""
        check_processes(self.cluster_environment, self.num_processes, self.num_nodes)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """On every rank. Of Lightning and dear, who comes first makes torch.distributed's default group for both.

        Lightning knows the backend for its devices; over MPI only dear can.
        """
        if launcher() is Launcher.MPI:
            init()
        super().setup_environment()
        mine, dears = (self.global_rank, self.world_size), (init().comm.rank, current().comm.size)
        if mine != dears:
            raise RuntimeError(
                f"{type(self.cluster_environment).__name__} makes this process rank {mine[0]} of {mine[1]}, and dear "
                f"rank {dears[0]} of {dears[1]}: leave the plugin out, or give it the launcher's numbers"
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def _collects(self) -> bool:
        """Whether this rank has a module's parameters for a checkpoint: of a sharded one rank 0 alone, which writes it."""
        return bool(self.is_global_zero) or self._wanted["strategy"] != "fsdp"

    def _distributed(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> torch.optim.Optimizer:
        """As given where the script has wrapped it itself, or where it holds nothing to train. On every rank."""
        if isinstance(optimizer, Shell) or not any(group["params"] for group in optimizer.param_groups):
            return optimizer
        return DistributedOptimizer(optimizer, model, **self._wanted)


class DearStrategy(_Job, _TrainerDDP):
    """For ``Trainer(strategy=DearStrategy(...))``; names like ``strategy="dear"`` are this one without options.

    Args:
        strategy: as in :func:`dear.DistributedOptimizer`, which gets every optimizer of ``configure_optimizers()`` that is
            not distributed already.
        accelerator: this, and what follows up to `timeout`: as in Lightning's ``DDPStrategy``.
        options: any other argument of the strategy's ``DistributedOptimizer``. Raises ``TypeError`` for one it has not.
    """

    def __init__(
        self,
        strategy: str = "dear",
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
        **options: Any,
    ) -> None:
        plugins = {
            "accelerator": accelerator,
            "parallel_devices": parallel_devices,
            "cluster_environment": cluster_environment,
            "checkpoint_io": checkpoint_io,
            "precision_plugin": precision_plugin,
            "process_group_backend": process_group_backend,
            "timeout": timeout,
        }
        super().__init__(strategy, options, plugins)
        self._training = False

    optimizers: list[Any]
    _optimizers: list[Any]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        _register(cls, strategy_registry)

    # - Setting up

    def configure_ddp(self) -> None:
        """Leave the model as it is: no DistributedDataParallel is put around it."""

    def setup_optimizers(self, trainer: Any) -> None:
        averaging = [type(one).__name__ for one in trainer.callbacks if isinstance(one, _AVERAGING)]
        if averaging and self._wanted["strategy"] == "fsdp":
            raise ValueError(
                f"the callback {averaging[0]} reads and writes all parameters between passes, when strategy 'fsdp' has a "
                "share of them on each rank: use strategy='dear', or a callback that does so inside `with "
                "dear.whole(pl_module):`"
            )
        super().setup_optimizers(trainer)
        self.optimizers = [self._distributed(optimizer, self.lightning_module) for optimizer in self.optimizers]

    def teardown(self) -> None:
        """Tear down without moving optimizers to the CPU: their state is in parts that no other rank has."""
        optimizers, self._optimizers = self._optimizers, []
        super().teardown()
        self._optimizers = optimizers

    # - Training

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for optimizer in self._shells():
                stack.enter_context(optimizer.no_sync())
            yield

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Evaluate Lightning's closure before ``step()``, unless the optimizer decides by the closure's loss.

        In manual optimization it is empty, as gradients are there already.
        """
        if not isinstance(optimizer, Shell) or (optimizer.decides_by_loss and closure is not _no_closure):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        plain = vars(optimizer).get("step")
        optimizer.step = MethodType(_evaluate_first, optimizer)  # type: ignore[method-assign]
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            if plain is None:
                del optimizer.step
            else:
                optimizer.step = plain  # type: ignore[method-assign]

    # - What is looked at in between

    def setup(self, trainer: Any) -> None:
        with _unsynchronized(self.model):
            super().setup(trainer)
        seen_to = any(isinstance(callback, _Averages) for callback in trainer.callbacks)
        if not seen_to and any(_has_hook(trainer, name) for name in ("on_after_backward", "on_before_optimizer_step")):
            trainer.callbacks.insert(0, _Averages())

    def on_train_start(self) -> None:
        self._training = True

    def on_train_end(self) -> None:
        self._meet()
        self._training = False

    def on_validation_start(self) -> None:
        """While training, give every rank rank 0's buffers, as DDP does, and under co2 the average of all models."""
        self._meet()
        if self._training:
            broadcast_parameters(dict(self.lightning_module.named_buffers()), root_rank=0)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's whole state; of a sharded one on rank 0, which writes the checkpoint, and empty on the others."""
        self._meet()
        return super().lightning_module_state_dict() if self._collects else {}

    def _meet(self) -> None:
        """Where ranks train models of their own, they become their average. On every rank."""
        for optimizer in self._shells() if self._training else []:
            if hasattr(optimizer, "average_parameters"):
                optimizer.average_parameters()

    def _shells(self) -> list[Shell]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, Shell)]

    # - Checkpoints

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state in torch's format on rank 0, which writes the checkpoint; an empty dict on the others."""
        return super().optimizer_state(optimizer) if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states, on every rank from the same checkpoint."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


@contextlib.contextmanager
def _unsynchronized(module: Any) -> Iterator[None]:
    """A context in which DDP's strategy, which broadcasts a module before it is evaluated, leaves out what is sharded."""
    optimizers = current().registry.having(list(module.parameters()))
    away = {id(slot.param) for optimizer in optimizers for slot in optimizer._engine.slots if slot.freed is not None}
    names = [name for name, parameter in module.named_parameters() if id(parameter) in away]
    before = getattr(module, _IGNORED, None)
    setattr(module, _IGNORED, [*(before or ()), *names])
    try:
        yield
    finally:
        if before is None:
            delattr(module, _IGNORED)
        else:
            setattr(module, _IGNORED, before)


class _Averages(_pytorch.Callback):
    """Runs before all other callbacks where one of them, or the module, may look at ``.grad``: it finds averages there."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.automatic_optimization and not trainer.fit_loop._should_accumulate():
            self.on_before_optimizer_step(trainer, pl_module, trainer.optimizers[0])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if isinstance(optimizer, Shell):
            optimizer.synchronize()


class DearFabricStrategy(_Job, _FabricDDP):
    """For ``Fabric(strategy=DearFabricStrategy(...))``; names like ``strategy="dear"`` are this one without options.

    Args:
        strategy: as in :func:`dear.DistributedOptimizer`, which gets the optimizers that are set up.
        accelerator: this, and what follows up to `timeout`: as in Fabric's ``DDPStrategy``.
        options: any other argument of the strategy's ``DistributedOptimizer``. Raises ``TypeError`` for one it has not.
    """

    def __init__(
        self,
        strategy: str = "dear",
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
        **options: Any,
    ) -> None:
        plugins = {
            "accelerator": accelerator,
            "parallel_devices": parallel_devices,
            "cluster_environment": cluster_environment,
            "checkpoint_io": checkpoint_io,
            "precision": precision,
            "process_group_backend": process_group_backend,
            "timeout": timeout,
        }
        super().__init__(strategy, options, plugins)
        self._backward_sync_control = _NoSync()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        _register(cls, strategy_registry)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Give `module` rank 0's parameters and buffers; it is not wrapped. On every rank."""
        broadcast_parameters(module.state_dict(), root_rank=0)
        self._backward_sync_control.optimizers.setdefault(module, [])
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Distribute `optimizer`, on every rank. Of the modules that are set up, it may train one or several."""
        trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
        modules = self._backward_sync_control.optimizers
        held = {module: {id(param) for param in module.parameters()} for module in modules}
        parts = [module for module, params in held.items() if trained & params]
        whole = next((module for module in parts if trained <= held[module]), None)
        if whole is None and parts:
            whole = torch.nn.ModuleList(parts)
        distributed = self._distributed(optimizer, whole)
        for module, params in held.items():
            if trained & params:
                modules[module].append(weakref.ref(distributed))
        return distributed

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint on rank 0, which can collect the optimizers' whole state, and sharded models, by itself."""
        if not self.is_global_zero:
            collected = torch.optim.Optimizer if self._collects else (torch.optim.Optimizer, torch.nn.Module)
            state = {name: part for name, part in state.items() if not isinstance(part, collected)}
        super().save_checkpoint(path, state, *args, **kwargs)


class _NoSync(_BackwardSyncControl):
    """``Fabric.no_backward_sync(module)``: of all optimizers that train it."""

    def __init__(self) -> None:
        #: Of each module that is set up, in that order.
        self.optimizers: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref[Any]]] = (
            weakref.WeakKeyDictionary()
        )

    @contextlib.contextmanager
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Iterator[None]:
        if module not in self.optimizers:
            raise TypeError(f"no_backward_sync() takes a module that setup() returned, and got {type(module).__name__}")
        with contextlib.ExitStack() as stack:
            for reference in self.optimizers[module] if enabled else []:
                optimizer = reference()
                if isinstance(optimizer, Shell):
                    stack.enter_context(optimizer.no_sync())
            yield


def _evaluate_first(optimizer: Shell, closure: Any = None, **kwargs: Any) -> Any:
    result = None if closure is None else closure()
    type(optimizer).step(optimizer, **kwargs)
    return result


def _has_hook(trainer: Any, name: str) -> bool:
    """Whether the module, or a callback, has a hook of its own by this name (pure)."""
    plain = getattr(_pytorch.LightningModule, name), getattr(_pytorch.Callback, name)
    return any(
        name in vars(one) or getattr(type(one), name) not in plain
        for one in (trainer.lightning_module, *trainer.callbacks)
    )


def _register(cls: type, registry: Any) -> None:
    for name, strategy in NAMES.items():
        about = f"gradients and updates by dear.DistributedOptimizer(strategy={strategy!r})"
        registry.register(name, partial(cls, strategy), description=about, override=True)


DearStrategy.register_strategies(importlib.import_module(f"{PYTORCH}.strategies").StrategyRegistry)
DearFabricStrategy.register_strategies(importlib.import_module(f"{FABRIC}.strategies").STRATEGY_REGISTRY)
