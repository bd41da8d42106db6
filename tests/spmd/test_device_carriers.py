"""A model whose tensors take a carrier trains as one that needs none. The device is pretended: memory of the host."""

from __future__ import annotations

import copy
import functools
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import bytescheduler_adapter
import dear
import fsdp
import mgwfbp
import osdp
import oss
import wfbp
from bench.gpu import parity
from comm_core import ReduceOp, Unsupported
from overlap.core.closing import OtherRankFailed
from overlap.core.shards import ShardUpdate
from overlap.features import clipping, rounded_parameters
from overlap.features.nonfinite import NonfiniteGradient
from overlap.job import devices, session
from overlap.job.devices import CudaCarriers
from overlap.transport.communicator import Communicator
from overlap.transport.cuda import streams
from overlap.transport.cuda.communicator import DeviceCommunicator
from overlap.transport.cuda.math import can_inspect, inspect
from overlap.transport.cuda.route import Facts, RouteError
from overlap.transport.cuda.staged import StagedCarrier
from overlap.transport.operation import all_gather, all_reduce, all_to_all, barrier, broadcast, reduce, reduce_scatter
from overlap.transport.work import arrive
from tests.spmd.device import Late, PlainStreams, pretend
from tests.spmd_plugin import RANK, SIZE

WRAP: dict[str, Callable[..., Any]] = {
    "dear": functools.partial(dear.DistributedOptimizer, threshold_mb=0.001),
    "dear-rb": functools.partial(dear.DistributedOptimizer, threshold_mb=0.001, policy="rb"),
    "dear-eager": functools.partial(dear.DistributedOptimizer, threshold_mb=0.001, eager=True),
    "dear-16": functools.partial(
        dear.DistributedOptimizer,
        threshold_mb=0.001,
        compression=dear.Compression.bf16,
        gather_dtype=torch.bfloat16,
    ),
    "fsdp": functools.partial(fsdp.DistributedOptimizer, threshold_mb=0.001, poison=False),  # so memory is freed
    "fsdp-16": functools.partial(
        fsdp.DistributedOptimizer,
        threshold_mb=0.001,
        poison=False,
        compression=dear.Compression.bf16,
        gather_dtype=torch.bfloat16,
    ),
    "fsdp-offload": functools.partial(fsdp.DistributedOptimizer, threshold_mb=0.001, poison=False, offload="cpu"),
    "fsdp-offload-16": functools.partial(
        fsdp.DistributedOptimizer,
        threshold_mb=0.001,
        poison=False,
        offload="cpu",
        compression=dear.Compression.bf16,
        gather_dtype=torch.bfloat16,
    ),
    "osdp": functools.partial(osdp.DistributedOptimizer, threshold_mb=0.001, memory_limit_gb=1000, poison=False),
    "oss": functools.partial(oss.DistributedOptimizer, threshold_mb=0.001),
    "wfbp": wfbp.DistributedOptimizer,
    "mgwfbp": functools.partial(mgwfbp.DistributedOptimizer, alpha_beta=(3e-5, 1e-9), profile_steps=2),
}


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


def _trained(wrap: Callable[..., Any]) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Linear(30, 2)
    )
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        inputs = torch.randn(4 * SIZE, 6, generator=generator)[4 * RANK : 4 * RANK + 4]
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    optimizer.synchronize()
    return [value.clone() for value in model.state_dict().values()] + [
        value for state in optimizer.state_dict()["state"].values() for value in state.values()
    ]


@pytest.mark.parametrize("given", ["model", "names", "nothing"])
@pytest.mark.parametrize("strategy", ["dear", "oss", "wfbp"])
def test_graphs_of_parameters_that_move_are_refused(
    pretended: None, monkeypatch: pytest.MonkeyPatch, strategy: str, given: str
) -> None:
    """Those made before the optimizer was wrapped, and those made later; wfbp's parameters do not move."""

    def wrapped(model: torch.nn.Module) -> Any:
        named: Any = {"model": model, "names": model.named_parameters(), "nothing": None}[given]
        return WRAP[strategy](torch.optim.SGD(model.parameters(), lr=0.1), named)

    def replay(inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(inputs, linear.weight, linear.bias)

    replay.__module__ = "torch.cuda.graphs"
    linear = torch.nn.Linear(2, 2)
    graphed = torch.nn.Sequential(linear, torch.nn.Tanh())
    if given == "model":
        linear.forward = replay
    else:  # a module around those that have parameters
        graphed.forward = replay
    other = torch.nn.Linear(2, 2)
    capturing = False
    monkeypatch.setattr(PlainStreams, "capturing", lambda _: capturing)
    if strategy == "wfbp":
        wrapped(graphed)
        wrapped(other)
        capturing = True
        other(torch.ones(1, 2))
        return
    with pytest.raises(
        ValueError, match=f"module '(0|Sequential)' is a CUDA graph .* strategy '{strategy}' moves them .*'wfbp'"
    ):
        wrapped(graphed)
    optimizer = wrapped(other)
    for capturing in (False, True, False):
        if capturing:
            with pytest.raises(Unsupported, match=f"captured into a CUDA graph, .* strategy '{strategy}' makes ready"):
                other(torch.ones(1, 2))
            copy.deepcopy(other)(torch.ones(1, 2))
        else:
            other(torch.ones(1, 2)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("strategy", WRAP)
def test_training_over_a_carrier_is_bit_identical(strategy: str, request: pytest.FixtureRequest) -> None:
    expected = _trained(WRAP[strategy])
    request.getfixturevalue("pretended")
    found = _trained(WRAP[strategy])
    assert (PlainStreams.copied > 0) is (SIZE > 1), "alone, nothing travels"
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("strategy", ["dear", "dear-rb", "dear-16", "oss", "fsdp"])
def test_updates_in_one_call_are_bit_identical(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, made = _trained(WRAP[strategy]), []
    monkeypatch.setattr(streams, "on_device", lambda _: True)
    update = ShardUpdate.step
    monkeypatch.setattr(ShardUpdate, "step", lambda self, buckets: [made.append(len(buckets)), update(self, buckets)])
    found = _trained(WRAP[strategy])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert max(made) > 1


class _Waits(TorchFunctionMode):
    """Notes where the host asks for values in the memory of `roots`, or computed from them, for which it would wait."""

    _ASK = frozenset(["item", "tolist", "numpy", "cpu", "nonzero", "equal", "allclose"])

    def __init__(self, roots: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._there = dict(map(_memory, roots))  # kept alive, so that no other memory has its address
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [_memory(one)[0] for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        there, name = not self._there.keys().isdisjoint(given), getattr(func, "__name__", "")
        fetched = name == "copy_" and given[0] not in self._there and not kwargs.get("non_blocking")
        if there and (fetched or name in self._ASK or re.fullmatch("__(bool|int|float|index)__", name)):
            self.found.append("".join(traceback.format_stack(limit=6)))
        result = func(*args, **kwargs)
        if there and name != "copy_":
            self._there.update(_memory(one) for one in tree_leaves(result) if isinstance(one, torch.Tensor))
        return result


def _memory(tensor: torch.Tensor) -> tuple[int, Any]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage


@pytest.mark.parametrize("strategy", ["dear", "wfbp"])
def test_a_reduction_follows_all_streams_that_wrote_gradients(
    strategy: str, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward computes the gradient of each layer on the stream that its forward has used."""
    now, followed = 0, list[tuple[int, set[int]]]()
    monkeypatch.setattr(PlainStreams, "current", lambda _: now)
    monkeypatch.setattr(PlainStreams, "follow", lambda _, others: followed.append((now, set(others))))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    one_bucket = {"threshold_mb": 25} if strategy == "dear" else {"num_groups": 1}
    wrap = dear.DistributedOptimizer if strategy == "dear" else wfbp.DistributedOptimizer
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **one_bucket)

    streams = {0: 1, 1: 1}  # by layer

    def computed_there(layer: int) -> Callable[[torch.Tensor], None]:
        def hook(_gradient: torch.Tensor) -> None:
            nonlocal now
            now = streams[layer]

        return hook

    for layer in streams:
        model[layer].weight.register_hook(computed_there(layer))
    for first in (1, 1, 2, 1):
        streams[0] = first
        model(torch.ones(1, 2)).sum().backward()
        now = 0
        optimizer.step()
        optimizer.zero_grad()
    assert followed == [(2 if strategy == "wfbp" else 0, {1, 2})], "in the other steps there is one stream"


@pytest.mark.parametrize("strategy", WRAP)
@pytest.mark.parametrize("clipped", [False, True])
def test_the_host_waits_for_nothing_in_a_steady_step(
    strategy: str, clipped: bool, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what a carrier copies through the host, and the norm of shards that are clipped, which is read once."""
    monkeypatch.setattr(rounded_parameters, "differ", None)  # which looks at memory that torch's functions do not see
    if clipped and strategy == "dear-eager":
        pytest.skip("updates before a norm is known")
    model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 2))
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5), model)
    inputs = torch.randn(4, 6)
    for _ in range(6):
        buckets = optimizer._engine.order
        held = [one for bucket in buckets for one in (bucket.gradients.whole, bucket.outgoing, bucket.incoming)]
        held += [one for bucket in buckets if bucket.sharded for one in (bucket.travelling, bucket.parameters.whole)]
        there = [bucket for bucket in buckets if not bucket.gradients.offloaded]
        held += [one for bucket in there for one in (bucket.gradients.shard, *_shards(bucket))]
        waits = _Waits([inputs, *model.parameters(), *held])
        with waits:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            if clipped:
                optimizer.clip_grad_norm_(0.1)
            optimizer.step()
    found = [stack for stack in waits.found if "cuda/staged.py" not in stack]
    assert len(found) <= int(clipped and not optimizer._averages.whole), "\n".join(found)


def _shards(bucket: Any) -> list[torch.Tensor]:
    return [bucket.parameters.shard] if bucket.sharded else []


def test_waits_are_seen() -> None:
    """So that the test above can fail."""
    weight = torch.nn.Parameter(torch.ones(2))
    with _Waits([weight]) as waits:
        (weight * 2).sum().item()
        weight.grad is None or weight.grad.tolist()
        bool((weight.detach()[0] > 0).any())
        torch.empty(2).copy_(weight.detach())
        torch.ones(2).tolist()
    assert len(waits.found) == 3


def test_of_a_device_too_what_is_not_finite_is_named(pretended: None) -> None:
    """And said on all ranks, in the next step, whichever rank looks at it; a step that is skipped is skipped on all."""
    for choice in ("raise", "skip"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)).double()
        optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, on_nonfinite=choice)
        for number in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3).double()).sum()
            if number == 1 and RANK == SIZE - 1:
                loss = loss + model[1].bias[1] * math.inf
            loss.backward()
            if number < 2 or choice == "skip":
                optimizer.step()
                continue
            with pytest.raises((NonfiniteGradient, OtherRankFailed), match=r"'1\.bias' was infinite or NaN in step 1"):
                optimizer.step()
        assert choice == "raise" or all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def _staged() -> tuple[Communicator, Communicator]:
    host = session.current().comm
    streams = PlainStreams(torch.device("cpu"))
    return host, DeviceCommunicator(host, StagedCarrier(host, streams), streams)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_staged_operations_are_the_hosts(dtype: torch.dtype, op: ReduceOp) -> None:
    host, staged = _staged()
    torch.manual_seed(RANK)
    mine, results = torch.randn(2 * SIZE + 1, dtype=dtype), []
    counts = [3] + [2] * (SIZE - 1)
    for comm in (host, staged):
        shard, whole, root = torch.zeros(counts[RANK], dtype=dtype), mine.clone(), torch.zeros_like(mine)
        arrive(comm.start(reduce_scatter(mine, shard, op)))
        gathered = torch.zeros_like(mine)
        comm.run(all_gather(shard, gathered, counts=counts))
        work = comm.start(all_reduce(whole, whole, op))
        work.order_before(0)
        comm.run(reduce(mine, root if RANK == SIZE - 1 else None, op, SIZE - 1))
        sent = mine.clone()
        comm.run(broadcast(sent, SIZE - 1))
        swapped = torch.zeros(2 * SIZE, dtype=dtype)
        comm.run(all_to_all(mine[: 2 * SIZE], swapped))
        results.append([shard, gathered, whole, root, sent, swapped])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_operations_on_the_hosts_tensors_follow_those_that_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks issue in one order, whenever their devices have made the copies."""

    class Elsewhere(PlainStreams):
        kind = "meta"  # tensors of the host are none of this device

    monkeypatch.setattr(Late, "wait", lambda _: time.sleep(0.05))
    host = session.current().comm
    streams = Elsewhere(torch.device("cpu"))
    carrier = StagedCarrier(host, streams)
    comm = DeviceCommunicator(host, carrier, streams)
    issued: list[str] = []
    monkeypatch.setattr(Communicator, "listener", lambda _comm, work: [work, issued.append(work.label)][0])
    for label, act in (("all_reduce", lambda one: comm.run(all_reduce(one, one, label="after"))), ("barrier", None)):
        one = torch.ones(2)
        late = carrier.prepare(all_reduce(one, one, label="late"))()
        if act is None:
            comm.run(barrier(label="after"))
        else:
            act(torch.ones(3))
        assert issued == ["late", "after"], label
        issued.clear()
        arrive(late)
        assert one.tolist() == [SIZE] * 2
    carrier.close()


def test_a_result_is_carried_once() -> None:
    _, staged = _staged()
    tensor = torch.ones(3)
    work = staged.start(all_reduce(tensor, tensor))
    work.wait()
    tensor.fill_(7)
    arrive(work)
    work.order_before(0)
    assert tensor.tolist() == [7, 7, 7]


def test_a_leased_channel_keeps_its_carrier(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    carriers, host = CudaCarriers(session.current()), session.current().comm
    route, place = devices.Route.STAGED, torch.device("cpu")
    watched: list[Communicator] = []
    monkeypatch.setattr(session.current().watchdog, "watch", watched.append)
    made = carriers.over(host, route, place)
    assert carriers.over(host, route, place) is made
    assert not watched, "the host's operations are watched already"


@pytest.mark.skipif(SIZE == 1, reason="nothing travels")
def test_early_updates_are_refused_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_facts", lambda parameters, refusal: Facts("cuda", f"card {RANK}", (2, 28, 3)))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RouteError, match="leave eager=True out, or set DEAR_CUDA_TRANSPORT=staged"):
        dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, eager=True)


def test_refusals_reach_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_facts", lambda parameters, refusal: Facts("cuda" if RANK else "cpu", "a card"))
    model = torch.nn.Linear(2, 2)
    if SIZE > 1:
        with pytest.raises(RouteError, match="the model is on cpu on rank 0 and on cuda on rank 1"):
            dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    monkeypatch.undo()
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(devices, "common_device", lambda named: cuda)
    with pytest.raises(RouteError, match=r"rank 0: strategy 'bytescheduler_adapter' sends from a thread.*cuda:0"):
        bytescheduler_adapter.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Tensors that are made without saying where hold nothing, so that whoever makes one for the host fails."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("strategy", ["dear", "dear-eager", "wfbp", "bytescheduler_adapter"])
def test_scripts_may_choose_where_tensors_are_made(strategy: str, elsewhere: None) -> None:
    with torch.device("cpu"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 9), dear.SyncBatchNorm(9), torch.nn.Linear(9, 1))
        inputs, scaler = torch.ones(2, 4) * (RANK + 1), torch.amp.GradScaler("cpu")
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrap = {**WRAP, "bytescheduler_adapter": bytescheduler_adapter.DistributedOptimizer}[strategy]
    optimizer = wrap(inner, model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        if strategy != "dear-eager":
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            dear.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    assert len(optimizer.state_dict()["state"]) == 6
    mean = dear.allreduce(inputs)
    assert mean.tolist() == [[(SIZE + 1) / 2] * 4] * 2
    assert dear.allgather_object(RANK) == list(range(SIZE))
    dear.join()
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_the_norms_of_inspections_is_torchs(norm_type: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watched(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        seen.append(len(tensors))
        return inspect(tensors)

    monkeypatch.setattr(clipping, "prefers_inspect", can_inspect)
    monkeypatch.setattr(clipping, "inspect", watched)
    torch.manual_seed(3)
    alone = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    shared = copy.deepcopy(alone)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    wrapped = WRAP["dear"](torch.optim.SGD(shared.parameters(), lr=0.1), shared)
    inputs = torch.randn(2 * SIZE, 5, dtype=torch.float64)
    for _ in range(3):
        plain.zero_grad()
        wrapped.zero_grad()
        (100 * alone(inputs).square().mean()).backward()
        (100 * shared(inputs[2 * RANK : 2 * RANK + 2]).square().mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5, norm_type)
        assert float(dear.clip_grad_norm_(shared.parameters(), 0.5, norm_type)) == pytest.approx(float(norm), rel=1e-12)
        plain.step()
        wrapped.step()
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert bool(seen) is (norm_type == 2.0), "one pass finds the squares of all pieces; other norms are torch's"


@pytest.mark.skipif(16 % SIZE != 0, reason="16 samples do not divide")
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_what_bench_gpu_asks_of_a_gpu_holds_here(strategy: str) -> None:
    assert parity.largest_difference(strategy, torch.device("cpu"), torch.float64) < 1e-11
