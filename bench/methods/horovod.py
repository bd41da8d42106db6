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

# One warm-up and 21 points of five samples each, which Horovod counts by the tensors that were reduced.
_SEARCH_STEPS = 120
_AUTOTUNE = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
    "HOROVOD_TORUS_ALLREDUCE": "0",
    "HOROVOD_CACHE_CAPACITY": "1024",
}


class Horovod(Method):
    """Horovod; ``fusion_mb`` sets HOROVOD_FUSION_THRESHOLD (default 128), ``cycle_ms`` HOROVOD_CYCLE_TIME (1).

    ``yield_when_idle``: Open MPI's ``mpi_yield_when_idle``, with which ranks that wait give up their cores instead of
    spinning. False: where there are more workers than cores; see :func:`bench.train.launcher.environment`.

    ``autotune``: Horovod searches fusion threshold and cycle time while it trains (HOROVOD_AUTOTUNE). It takes its own 21
    points, with five samples for each; a sample is one step here, of its ten, so that the search ends after some 110 steps.
    What is no choice between hosts of one rank is fixed.
    """

    name = "horovod"
    launchers = ("mpi",)
    timeline_variable = "HOROVOD_TIMELINE"
    defaults: ClassVar[Mapping[str, Any]] = {
        "fusion_mb": None,
        "cycle_ms": None,
        "autotune": False,
        "yield_when_idle": False,
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        given = [name for name in ("fusion_mb", "cycle_ms") if self.options[name] is not None]
        if self.options["autotune"] and given:
            raise ValueError(f"autotune of horovod searches {' and '.join(given)}: leave one of them out")
        self._to_search = _SEARCH_STEPS if self.options["autotune"] else 0

    @property
    def environment(self) -> dict[str, str]:
        environment = {}
        if self.options["fusion_mb"] is not None:
            environment["HOROVOD_FUSION_THRESHOLD"] = str(int(self.options["fusion_mb"] * 2**20))
        if self.options["cycle_ms"] is not None:
            environment["HOROVOD_CYCLE_TIME"] = str(self.options["cycle_ms"])
        if self.options["autotune"]:
            environment |= _AUTOTUNE
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

    def tuning(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the search goes on: Horovod does not say, so its steps are counted; called before each."""
        self._to_search -= self._to_search > 0
        return self._to_search > 0

    def leave(self) -> None:
        self._hvd.shutdown()
