"""Methods in common use at their best: every option reaches the library that it is of."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from bench.methods import process_group
from bench.methods.method import Method, MethodUnavailable
from bench.methods.registry import method
from bench.methods.spec import family_of
from bench.train.launcher import LauncherError, pick
from bench.train.settings import Settings
from overlap.job import session
from tests.harness import ROOT, run_ranks

CPU = torch.device("cpu")
SGD = (torch.optim.SGD, {"lr": 0.1})


@pytest.fixture
def alone() -> Iterator[None]:
    """torch.distributed with one rank, over gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def _distributed(spec: str) -> tuple[Any, Any]:
    chosen = method(spec)
    assert chosen.join(CPU).size == 1
    return chosen.distribute(_model(), SGD)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 64)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


# - DDP


@pytest.mark.parametrize(
    ("spec", "name", "value"),
    [
        ("ddp:bucket_mb=0.25", "bucket_cap_bytes", 2**18),
        ("ddp:view=True", "gradient_as_bucket_view", 1),
        ("ddp:static_graph=True", "static_graph", 1),
        ("ddp", "static_graph", 0),
    ],
)
def test_options_of_ddp_reach_torch(spec: str, name: str, value: int, alone: None) -> None:
    model, optimizer = _distributed(spec)
    for _ in range(3):
        _step(model, optimizer)
    assert model._get_ddp_logging_data().get(name, 0) == value


@pytest.mark.parametrize(("words", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("name", ["ddp", "ddp-zero"])
def test_compressed_gradients_travel_in_16_bits(
    name: str, words: str, dtype: torch.dtype, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, all_reduce = [], dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **rest: Any) -> Any:
        sent.append(tensor.dtype)
        return all_reduce(tensor, *args, **rest)

    monkeypatch.setattr(dist, "all_reduce", noted)
    model, optimizer = _distributed(f"{name}:compression={words}")
    losses = [_step(model, optimizer) for _ in range(4)]
    assert set(sent) == {dtype}
    assert losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
@pytest.mark.parametrize(
    ("spec", "buckets"),
    [
        ("ddp:powersgd=2,bucket_mb=0.02", "several"),
        ("ddp:powersgd=2,bucket_mb=0.02,static_graph=True", "several"),
        ("ddp:powersgd=2", "one"),
    ],
)
def test_powersgd_has_a_group_for_each_of_its_buckets(launcher: str, spec: str, buckets: str) -> None:
    """Two ranks train the same model, with gradients of their own, and stay the same."""
    argv = ["-m", "tests.bench.powersgd", spec, buckets]
    run_ranks(2, argv, launcher, cwd=ROOT).check()


def test_jobs_of_mpirun_on_one_machine_meet_at_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one job joined the other, or found its port in use."""
    ports = []
    for job in ("prterun-here-7@1", "prterun-here-8@1", "prterun-here-7@1"):
        with monkeypatch.context() as patch:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                patch.setenv(name, "")  # so that what is set goes away
                patch.delenv(name)
            patch.setenv("OMPI_COMM_WORLD_RANK", "1")
            patch.setenv("OMPI_COMM_WORLD_SIZE", "2")
            patch.setenv("PMIX_NAMESPACE", job)
            process_group.tell_as_torchrun()
            ports.append(int(os.environ["MASTER_PORT"]))
    assert ports[0] == ports[2] != ports[1]


def test_what_ddp_cannot_have_together_is_refused() -> None:
    with pytest.raises(ValueError, match="powersgd and compression of ddp both say what gradients become"):
        method("ddp:powersgd=2,compression=bf16")
    with pytest.raises(ValueError, match="compression of ddp should be one of bf16, fp16, or None, and is 'fp8'"):
        method("ddp:compression=fp8")


# - ZeroRedundancyOptimizer


def test_parameters_of_zero_live_in_buckets(alone: None) -> None:
    _, plain = _distributed("ddp-zero")
    model, optimizer = _distributed("ddp-zero:parameter_view=True,bucket_mb=0.25")
    assert isinstance(optimizer, ZeroRedundancyOptimizer)
    assert (plain.parameters_as_bucket_view, optimizer.parameters_as_bucket_view) == (False, True)
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1
    assert model._get_ddp_logging_data()["bucket_cap_bytes"] == 2**18


def test_zero_updates_in_backward_where_torch_lets_it(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="Gloo backend using Overlapping DDP with ZeRO may meet hangs"):
        _distributed("ddp-zero:overlap=True")
    # One rank waits for nobody, whatever its backend says that it is.
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    model, optimizer = _distributed("ddp-zero:overlap=True")
    monkeypatch.setattr(optimizer, "step", lambda: None)
    losses = [_step(model, optimizer) for _ in range(6)]
    assert losses[0] == losses[1]  # buckets are not known yet
    assert losses[-1] < losses[-2] < losses[0]


def test_zero_that_overlaps_needs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MethodUnavailable, match="overlap of ddp-zero needs NCCL, and so GPUs"):
        method("ddp-zero:overlap=True").look()
    method("ddp-zero").look()
    with pytest.raises(ValueError, match="leave parameter_view out"):
        method("ddp-zero:overlap=True,parameter_view=True")


# - FSDP2


@pytest.mark.parametrize("spec", ["fsdp2:unit_layers=1,prefetch=2", "fsdp2:unit_layers=1"])
def test_units_of_fsdp_are_gathered_ahead(spec: str, alone: None) -> None:
    chosen = method(spec)
    chosen.join(CPU)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    root, optimizer = chosen.distribute(nn.Sequential(*layers), SGD)
    ahead = 2 if "prefetch" in spec else 0

    def states(unit: Any, direction: str) -> list[Any]:
        return list(getattr(unit._get_fsdp_state(), f"_states_to_{direction}_prefetch"))

    of = [layer._get_fsdp_state() for layer in layers]  # type: ignore[operator]
    assert states(root, "forward") == of[:ahead]
    assert states(root, "backward") == of[::-1][:ahead]
    for number, layer in enumerate(layers):
        assert states(layer, "forward") == of[number + 1 :][:ahead]
        assert states(layer, "backward") == of[:number][::-1][:ahead]
    optimizer.zero_grad()
    root(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def test_fsdp_gathers_whole_numbers_of_units_ahead() -> None:
    with pytest.raises(ValueError, match="prefetch of fsdp2 should be a whole number of at least 1, or None, and is 0"):
        method("fsdp2:prefetch=0")


# - Horovod, by a double


class _Double:
    """Stands in for Horovod's modules, and keeps what they were told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, gloo: bool = True) -> None:
        self.told: dict[str, str] = {}
        self.optimizer: dict[str, Any] = {}
        self.stopped = False
        torch_part = types.SimpleNamespace(
            init=lambda: self.told.update({name: value for name, value in os.environ.items() if "HOROVOD" in name}),
            rank=lambda: 0,
            size=lambda: 1,
            gloo_built=lambda: gloo,
            mpi_enabled=lambda: True,
            broadcast_parameters=lambda state, root_rank: None,
            Compression=types.SimpleNamespace(none="as it is", fp16="in 16 bits"),
            DistributedOptimizer=lambda optimizer, **rest: self.optimizer.update(rest),
        )

        class Server:
            def start(own) -> int:
                return 4321

            def init(own, slots: list[Any]) -> None:
                assert [slot.rank for slot in slots] == [0]

            def stop(own) -> None:
                self.stopped = True

        slot = types.SimpleNamespace(hostname="host0", rank=0)
        parts = {
            "horovod.torch": torch_part,
            "horovod.runner.common.util.hosts": types.SimpleNamespace(
                parse_hosts=lambda text: text, get_host_assignments=lambda hosts, count: [slot][: count if hosts else 0]
            ),
            "horovod.runner.gloo_run": types.SimpleNamespace(
                create_slot_env_vars=lambda slot: {"HOROVOD_RANK": str(slot.rank), "HOROVOD_HOSTNAME": slot.hostname}
            ),
            "horovod.runner.http.http_server": types.SimpleNamespace(RendezvousServer=Server),
        }
        for name, part in parts.items():
            monkeypatch.setitem(sys.modules, name, part)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a job of one rank, under torchrun."""
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_", "HOROVOD_"))]:
        monkeypatch.delenv(name)
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)


def test_horovod_meets_over_gloo_without_mpi(torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    double = _Double(monkeypatch)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "eth7")  # so that it goes away afterwards
    chosen = method("horovod:operations=gloo")
    assert chosen.environment == {"HOROVOD_CPU_OPERATIONS": "gloo"}
    chosen.join(CPU)
    wanted = {"HOROVOD_RANK": "0", "HOROVOD_HOSTNAME": "host0", "HOROVOD_CONTROLLER": "gloo"}
    meeting = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4321"}
    assert double.told == {**wanted, **meeting, "HOROVOD_GLOO_IFACE": "eth7"}
    assert not any(name in os.environ for name in {**wanted, **meeting})
    assert double.stopped
    assert chosen.bytes_over() == "gloo"


def test_horovod_without_gloo_says_so(torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _Double(monkeypatch, gloo=False)
    with pytest.raises(MethodUnavailable, match="this Horovod was built without gloo"):
        method("horovod:operations=gloo").join(CPU)


def test_horovod_compresses_by_its_own_class(torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec, compression in (("horovod:operations=gloo,compression=fp16", "in 16 bits"), ("horovod", "as it is")):
        double = _Double(monkeypatch)
        chosen = method(spec)
        chosen._hvd = sys.modules["horovod.torch"]  # type: ignore[attr-defined]
        chosen.distribute(_model(), SGD)
        assert double.optimizer["compression"] == compression


def test_horovods_search_has_as_many_steps_as_it_is_told() -> None:
    for spec, told, steps in (
        ("horovod:autotune=True", "1", 120),
        ("horovod:autotune=True,sample_steps=10", "10", 1110),
    ):
        chosen = method(spec)
        assert chosen.environment["HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"] == told
        taken = 0
        while chosen.tuning(torch.optim.SGD([torch.zeros(1)])):
            taken += 1
        assert taken == steps - 1
    with pytest.raises(ValueError, match=r"sample_steps=10 of horovod is of its search: give autotune=True, too"):
        method("horovod:sample_steps=10")
    with pytest.raises(ValueError, match="sample_steps of horovod should be a whole number"):
        method("horovod:autotune=True,sample_steps=0.5")
    with pytest.raises(ValueError, match="operations of horovod should be one of mpi, gloo, or None, and is 'ccl'"):
        method("horovod:operations=ccl")


# - What starts them, and what moves their bytes


@pytest.mark.parametrize(
    ("spec", "launchers"),
    [
        ("horovod", ("mpi",)),
        ("horovod:operations=mpi", ("mpi",)),
        ("horovod:operations=gloo", ("torchrun",)),
        ("dear", ("mpi", "torchrun")),
        ("dear:transport=mpi", ("mpi",)),
        ("fsdp:transport=gloo", ("torchrun",)),
        ("oss:transport=tcp", ("mpi", "torchrun")),
    ],
)
def test_a_transport_decides_who_starts_the_workers(spec: str, launchers: tuple[str, ...]) -> None:
    chosen = method(spec)
    assert chosen.launchers == launchers
    for launcher in {"mpi", "torchrun"} - set(launchers):
        with pytest.raises(LauncherError, match=f"not under {launcher}"):
            pick(Settings(launcher=launcher), chosen)


def test_a_strategy_with_a_transport_is_another_method() -> None:
    chosen = method("dear:transport=mpi,threshold_mb=4")
    assert chosen.environment == {"DEAR_TRANSPORT": "mpi"}
    assert chosen.options == {"threshold_mb": 4}
    assert method("dear").environment == {}
    assert family_of("dear:transport=mpi,threshold_mb=4") == "dear:transport=mpi"
    assert family_of("horovod:operations=gloo,fusion_mb=4") == "horovod"
    with pytest.raises(ValueError, match="transport of dear should be one of tcp, mpi, gloo and is 'ib'"):
        method("dear:transport=ib")


def test_methods_say_what_moves_their_bytes(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    of: dict[str, Method] = {name: method(name) for name in ("none", "ddp", "ddp-zero", "fsdp2", "dear")}
    for name in ("ddp", "ddp-zero", "fsdp2"):
        of[name].join(torch.device("cpu"))
    assert [of[name].bytes_over() for name in ("none", "ddp", "ddp-zero", "fsdp2")] == ["", "gloo", "gloo", "gloo"]
    comm = types.SimpleNamespace(backend="tcp")
    monkeypatch.setattr(session, "current", lambda: types.SimpleNamespace(comm=comm))
    assert of["dear"].bytes_over() == "tcp"
