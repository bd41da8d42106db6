"""Our strategies as methods, each the optimizer of the package of its name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.methods.method import MakeOptimizer, Method, MethodUnavailable, Place, tensor_bytes
from bench.methods.spec import refuse_unknown
from overlap.job import session
from overlap.plan.strategy import PlannedStrategy
from overlap.plan.tuning.space import describe

__all__ = ["PACKAGES", "Strategy"]

# The method's name in benchmarks, and the package that implements it.
PACKAGES = {
    "dear": "dear",
    "wfbp": "wfbp",
    "mgwfbp": "mgwfbp",
    "bytescheduler": "bytescheduler_adapter",
    "oss": "oss",
    "fsdp": "fsdp",
    "osdp": "osdp",
    "co2": "co2",
}
_GIVEN = ("optimizer", "named_parameters", "others")  # by the benchmark, or options of other strategies
_STARTED_BY = {"tcp": ("mpi", "torchrun"), "mpi": ("mpi",), "gloo": ("torchrun",)}  # for each transport
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Strategy(Method):
    """A strategy of ours; options are keyword arguments of its package's ``DistributedOptimizer``.

    `compression` and `gather_dtype` are written ``bf16`` or ``fp16``. One option more: ``transport``, what moves the bytes
    (``DEAR_TRANSPORT``): ``tcp``, ``mpi`` under mpirun, or ``gloo`` under torchrun.
    """

    launchers: tuple[str, ...] = ("mpi", "torchrun")
    timeline_variable = "DEAR_TIMELINE"

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name  # type: ignore[misc]  # one class for all of them
        self.options = dict(options)
        self._transport = self.options.pop("transport", None)
        if self._transport is not None:
            if self._transport not in _STARTED_BY:
                words = ", ".join(_STARTED_BY)
                raise ValueError(f"transport of {name} should be one of {words} and is {self._transport!r}")
            self.launchers = _STARTED_BY[self._transport]
        package = PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise MethodUnavailable(f"{name} needs the package {package}, which is not here")
        self._package = importlib.import_module(package)
        own = inspect.signature(self._package.DistributedOptimizer).parameters
        refuse_unknown(name, options, [*(each for each in own if each not in _GIVEN), "transport"])
        for option, known in (("compression", vars(self._package.Compression)), ("gather_dtype", _DTYPES)):
            if option in options:
                if options[option] not in _DTYPES:
                    raise ValueError(f"{option} should be one of {', '.join(_DTYPES)} and is {options[option]!r}")
                self.options[option] = known[options[option]]

    @property
    def environment(self) -> dict[str, str]:
        return {} if self._transport is None else {"DEAR_TRANSPORT": self._transport}

    @property
    def passes(self) -> int:
        return int(self.options.get("backward_passes_per_step", 1))

    def digest(self, model: nn.Module) -> str:
        with self._package.whole(model):
            return super().digest(model)

    def bytes_over(self) -> str:
        return session.current().comm.backend

    def join(self, device: torch.device) -> Place:
        self._package.init()
        return Place(self._package.rank(), self._package.size())

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        build, arguments = make
        optimizer = build(model.parameters(), **arguments)
        return model, self._package.DistributedOptimizer(optimizer, model, **self.options)

    def tuning(self, optimizer: torch.optim.Optimizer) -> bool:
        return bool(optimizer.tuning)  # type: ignore[attr-defined]

    def setting(self, optimizer: torch.optim.Optimizer) -> str:
        strategy = optimizer.strategy  # type: ignore[attr-defined]
        planned = strategy.planned if isinstance(strategy, PlannedStrategy) else {}
        return describe({**strategy.setting, **planned})

    def save_profile(self, optimizer: torch.optim.Optimizer, path: Path, batch_size: int) -> None:
        optimizer.save_profile(path, batch_size=batch_size)  # type: ignore[attr-defined]

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.synchronize()  # type: ignore[attr-defined]

    def state_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        return tensor_bytes(optimizer.held_state)  # type: ignore[attr-defined]

    def limit_bytes(self, optimizer: torch.optim.Optimizer) -> int | None:
        return self._watching(optimizer).limit if self.name == "osdp" else None

    def most_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        return self._watching(optimizer).peak if self.name == "osdp" else 0

    @staticmethod
    def _watching(optimizer: torch.optim.Optimizer) -> Any:
        return optimizer._planned  # type: ignore[attr-defined]

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        if self.name == "co2":
            optimizer.average_parameters()  # type: ignore[attr-defined]

    def leave(self) -> None:
        self._package.shutdown()
