"""Horovod itself, as ``make horovod`` builds it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.rendezvous import rendezvous

from bench.methods.method import MakeOptimizer, Method, MethodUnavailable, Place
from overlap.job.launch import Launch, Launcher, detect

__all__ = ["Horovod"]

# One warm-up and 21 points of five samples each, which Horovod counts by the tensors that were reduced: some steps more.
_SAMPLES, _MORE_STEPS = 22 * 5, 10
_AUTOTUNE = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
    "HOROVOD_TORUS_ALLREDUCE": "0",
    "HOROVOD_CACHE_CAPACITY": "1024",
}
_SERVER = "horovod/server"  # in the store of torchrun: the port of Horovod's own


class Horovod(Method):
    """Horovod; ``fusion_mb`` sets HOROVOD_FUSION_THRESHOLD (default 128), ``cycle_ms`` HOROVOD_CYCLE_TIME (1).

    ``operations``: ``mpi`` or ``gloo``, what moves the bytes (HOROVOD_CPU_OPERATIONS). With ``gloo`` it runs under
    torchrun, without MPI, where ranks meet as under ``horovodrun --gloo``. Under mpirun Horovod 0.28.1 never connects its
    gloo, and ends in its first broadcast. ``compression``: ``fp16``, its own Compression.fp16. ``yield_when_idle``: Open
    MPI's ``mpi_yield_when_idle``: ranks that wait give up their cores instead of spinning. False: where there are more
    workers than cores; see :func:`bench.train.launcher.environment`.

    ``autotune``: Horovod searches fusion threshold and cycle time while it trains (HOROVOD_AUTOTUNE). It takes its own 21
    points, with five samples for each. ``sample_steps``: the steps of a sample, 10 as Horovod has it, or 1 where that is
    left out: the search ends after some 1,110 steps, or 120. What is no choice between hosts of one rank is fixed.
    """

    name = "horovod"
    launchers: tuple[str, ...] = ("mpi",)
    timeline_variable = "HOROVOD_TIMELINE"
    defaults: ClassVar[Mapping[str, Any]] = {
        "fusion_mb": None,
        "cycle_ms": None,
        "autotune": False,
        "sample_steps": None,
        "yield_when_idle": False,
        "operations": None,
        "compression": None,
    }
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"operations": ("mpi", "gloo"), "compression": ("fp16",)}

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        given = [name for name in ("fusion_mb", "cycle_ms") if self.options[name] is not None]
        if self.options["autotune"] and given:
            raise ValueError(f"autotune of horovod searches {' and '.join(given)}: leave one of them out")
        steps = self.options["sample_steps"]
        if steps is not None and not self.options["autotune"]:
            raise ValueError(f"sample_steps={steps} of horovod is of its search: give autotune=True, too")
        if steps is not None and (steps != int(steps) or steps < 1):
            raise ValueError(f"sample_steps of horovod should be a whole number of at least 1, or None, and is {steps}")
        self._sample_steps = int(steps or 1)
        self._to_search = _SAMPLES * self._sample_steps + _MORE_STEPS if self.options["autotune"] else 0
        if self.options["operations"] == "gloo":
            self.launchers = ("torchrun",)

    @property
    def environment(self) -> dict[str, str]:
        environment = {}
        if self.options["fusion_mb"] is not None:
            environment["HOROVOD_FUSION_THRESHOLD"] = str(int(self.options["fusion_mb"] * 2**20))
        if self.options["cycle_ms"] is not None:
            environment["HOROVOD_CYCLE_TIME"] = str(self.options["cycle_ms"])
        if self.options["autotune"]:
            environment |= {**_AUTOTUNE, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": str(self._sample_steps)}
        if self.options["yield_when_idle"]:
            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if self.options["operations"] is not None:
            environment["HOROVOD_CPU_OPERATIONS"] = self.options["operations"]
        return environment

    def look(self) -> None:
        if importlib.util.find_spec("horovod") is None:
            raise MethodUnavailable("horovod is not installed; `make horovod` builds it")

    def join(self, device: torch.device) -> Place:
        self._hvd = importlib.import_module("horovod.torch")
        if self.options["operations"] == "gloo" and not self._hvd.gloo_built():
            raise MethodUnavailable(
                "this Horovod was built without gloo; remove it, and `make horovod` builds one with it"
            )
        if "GLOO_SOCKET_IFNAME" in os.environ:  # the interface that torch's gloo is told
            os.environ.setdefault("HOROVOD_GLOO_IFACE", os.environ["GLOO_SOCKET_IFNAME"])
        launch = detect(os.environ)
        if launch.launcher is Launcher.TORCHRUN:
            with _meeting(launch):
                self._hvd.init()
        else:
            self._hvd.init()
        return Place(self._hvd.rank(), self._hvd.size())

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        build, arguments = make
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = build(model.parameters(), **arguments)
        compression = getattr(self._hvd.Compression, self.options["compression"] or "none")
        # A tied parameter has one name here: Horovod refuses a second one.
        named = model.named_parameters()
        return model, self._hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)

    def bytes_over(self) -> str:
        return self.options["operations"] or ("mpi" if self._hvd.mpi_enabled() else "gloo")

    def tuning(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the search goes on: Horovod does not say, so its steps are counted; called before each."""
        self._to_search -= self._to_search > 0
        return self._to_search > 0

    def leave(self) -> None:
        self._hvd.shutdown()


@contextmanager
def _meeting(launch: Launch) -> Iterator[None]:
    """Tell Horovod of the ranks that torchrun has started, while it starts: where they meet, and which one this is.

    That is a server of Horovod's own on rank 0. On every rank; every host has equally many.
    """
    hosts, slots_of = (importlib.import_module(f"horovod.runner.{name}") for name in ("common.util.hosts", "gloo_run"))
    local = launch.local_size or launch.size
    names = ",".join(f"host{number}:{local}" for number in range(launch.size // local))
    slots = hosts.get_host_assignments(hosts.parse_hosts(names), launch.size)
    store, _, _ = next(iter(rendezvous("env://")))
    server = None
    if launch.rank == 0:
        server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
        port = server.start()
        server.init(slots)
        store.set(_SERVER, str(port))
    told = {
        **slots_of.create_slot_env_vars(slots[launch.rank]),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": os.environ["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": store.get(_SERVER).decode(),
    }
    os.environ.update(told)
    try:
        yield
        store.set(f"{_SERVER}/{launch.rank}", "met")
        if server is not None:  # the others are done with it, too
            store.wait([f"{_SERVER}/{rank}" for rank in range(launch.size)])
    finally:
        for name in told:
            del os.environ[name]
        if server is not None:
            server.stop()
