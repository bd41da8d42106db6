"""Horovod itself, as ``make horovod`` builds it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from bench.methods.method import MakeOptimizer, Method, MethodUnavailable, Place

__all__ = ["Horovod"]


class Horovod(Method):
    """``fusion_mb`` sets HOROVOD_FUSION_THRESHOLD (its default: 128), ``cycle_ms`` HOROVOD_CYCLE_TIME (1).

    ``yield_when_idle``: Open MPI's ``mpi_yield_when_idle``, with which ranks that wait give up their cores instead of
    spinning. False: where there are more workers than cores; see :func:`bench.train.launcher.environment`.
    """

    name = "horovod"
    launchers = ("mpi",)
    timeline_variable = "HOROVOD_TIMELINE"
    defaults: ClassVar[Mapping[str, Any]] = {"fusion_mb": None, "cycle_ms": None, "yield_when_idle": False}

    @property
    def environment(self) -> dict[str, str]:
        environment = {}
        if self.options["fusion_mb"] is not None:
            environment["HOROVOD_FUSION_THRESHOLD"] = str(int(self.options["fusion_mb"] * 2**20))
        if self.options["cycle_ms"] is not None:
            environment["HOROVOD_CYCLE_TIME"] = str(self.options["cycle_ms"])
        if self.options["yield_when_idle"]:
            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
        return environment

    def look(self) -> None:
        if importlib.util.find_spec("horovod") is None:
            raise MethodUnavailable("horovod is not installed; `make horovod` builds it")

    def join(self, device: torch.device) -> Place:
        self._hvd = importlib.import_module("horovod.torch")
        self._hvd.init()
        return Place(self._hvd.rank(), self._hvd.size())

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        build, arguments = make
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = build(model.parameters(), **arguments)
        # A tied parameter has one name here: Horovod refuses a second one.
        return model, self._hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def leave(self) -> None:
        self._hvd.shutdown()
