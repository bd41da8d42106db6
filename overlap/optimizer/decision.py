"""Decides about buckets: rank 0 simulates what all ranks have measured and decides, everybody follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from overlap.core.clock import StepClock
from overlap.core.engine import Engine
from overlap.core.gates.passing import passing_cost
from overlap.job.memory.counted import available_bytes
from overlap.job.session import current
from overlap.plan.choice import Job, choose
from overlap.plan.link_probe import start_cost
from overlap.plan.measurement import (
    Sent,
    Times,
    bare_workload,
    fitted,
    layer_times,
    services,
    thread_costs,
    without_passing,
    workload,
)
from overlap.plan.partition import BucketSpec
from overlap.plan.plan import Plan
from overlap.plan.simulation.network import Fitted
from overlap.plan.simulation.workload import Workload
from overlap.plan.strategy import PlannedStrategy
from overlap.plan.tuning.space import describe
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.encoding import travels
from overlap.transport.objects import agree, allgather_object, broadcast_object
from overlap.transport.operation import all_reduce

__all__ = ["Report", "decided", "in_a_line", "layers_of", "link_of", "work_of"]

_ROOM = 0.25  # of the memory that is free, which a plan may take
_LEAST_PATIENCE = 0.3  # seconds of simulation, or as long as a step
_GAIN = 0.98  # a new plan has to be simulated to take less than this share of the old one's time


@travels
@dataclass(frozen=True)
class Report:
    """Rank 0's decision and what it rests on; the same on every rank."""

    setting: dict[str, float]  # as it is now
    before: dict[str, float]  # as it was
    measured: float  # seconds of a step, as it was
    simulated_before: float
    simulated: float
    times: Times | None  # of the rank that computes longest
    computed: list[float]  # seconds, by rank; 0 where a rank had no batch
    network: tuple[float, float, float]  # seconds of a start, per reduced byte and per gathered byte
    tried: int
    problem: str = ""


def decided(comm: Communicator, engine: Engine, strategy: PlannedStrategy, clock: StepClock, measured: float) -> Report:
    """Rank 0's decision about `strategy`, which is in force. On every rank, with what each has measured."""
    units = engine.planner.units
    layer_of = layers_of(units)
    start, handling = start_cost(link_of(comm, engine))
    laps, sent = clock.read()
    rank = engine.participants.ranks.index(engine.participants.rank)
    mine: Times | None = layer_times(laps, layer_of, len(units))
    if mine is not None:
        share = {bucket.index: bucket.shares[rank] * bucket.gradients.whole.element_size() for bucket in engine.order}
        per_byte, bucket_cost = thread_costs(sent, laps, share, handling, together=clock.launched)
        if not clock.launched:
            mine = without_passing(mine, [len(unit) for unit in units], passing_cost())
        mine = replace(mine, update=per_byte, handling=bucket_cost)
    found = services(sent, start / 2)
    took = torch.tensor([seconds for seconds, _ in found], dtype=torch.float64)
    room = available_bytes(engine.round.comm.place) / current().local_size * _ROOM
    told = allgather_object(comm, (len(sent), 0.0 if mine is None else mine.computed, _state_per_byte(engine), room))
    known = {length for length, *_ in told}
    if took.numel() and len(known) == 1:
        comm.run(all_reduce(took, took, ReduceOp.MIN, label="plan"))
    computed = [each[1] for each in told]
    slowest = max(range(len(computed)), key=computed.__getitem__)
    times = broadcast_object(comm, mine, slowest)  # that one's alone: of many ranks and layers, all would be much
    report: Report | None = None
    if comm.rank == 0:
        before = dict(strategy.planned)
        nbytes = sum(slot.param.nbytes for slot in engine.slots if slot.index in layer_of)
        empty = Report(before, before, measured, 0.0, 0.0, times, computed, (0.0, 0.0, 0.0), 0)
        state, room = max(each[2] for each in told), min(each[3] for each in told)

        def fits(plan: Plan) -> bool:
            """Whether a rank can hold the whole optimizer state of what is not sharded, and some buckets twice."""
            whole = sum(_nbytes(bucket.spec, engine) for bucket in plan if not bucket.sharded)
            return state * whole + nbytes <= room

        try:
            report = _chosen(engine, strategy, sent, (took.tolist(), [late for _, late in found]), start, empty, fits)
        except (ArithmeticError, LookupError, ValueError) as error:
            report = replace(empty, problem=f"what was measured cannot be simulated ({type(error).__name__}: {error})")
    return agree(comm, report)  # type: ignore[return-value]


def link_of(comm: Communicator, engine: Engine) -> Communicator:
    """By what a probe of the link goes: `comm`, or what moves gradients where these are a device's."""
    return comm if engine.round.comm.place.type == "cpu" else engine.round.comm


def _chosen(
    engine: Engine,
    strategy: PlannedStrategy,
    sent: list[Sent],
    took: tuple[list[float], list[bool]],
    start: float,
    empty: Report,
    fits: Callable[[Plan], bool],
) -> Report:
    if empty.times is None:
        return replace(empty, problem="no rank has seen a forward and a backward pass through the model's modules")
    if not sent:
        return replace(empty, problem="no bucket has sent anything in the steps that were measured")
    network: Fitted = fitted(len(engine.participants.ranks), sent, *took, start / 2)
    units = engine.planner.units
    work = work_of(engine, empty.times, units)
    job = Job(work, network, engine.planner.specs, layers_of(units, behind=1))
    choice = choose(strategy, engine.planner.preview, job, fits, _patience(empty.measured))
    worth = choice.seconds < _GAIN * choice.before
    return replace(
        empty,
        setting=dict(choice.setting) if worth else empty.before,
        simulated_before=choice.before,
        simulated=choice.seconds if worth else choice.before,
        network=(network.start, network.reduce, network.gather),
        tried=choice.tried,
    )


def _patience(step: float) -> Callable[[], bool]:
    """Whether the search has taken long enough: all ranks wait for it."""
    begun = time.perf_counter()
    return lambda: time.perf_counter() - begun > max(_LEAST_PATIENCE, step)


def _nbytes(bucket: BucketSpec, engine: Engine) -> int:
    return bucket.padded_numel * engine.slots[bucket.tensors[0]].param.element_size()


def _state_per_byte(engine: Engine) -> float:
    """Bytes of the optimizer's state for each byte of the parameters that this rank updates in shards."""
    if engine.shards is None:
        return 0.0
    pieces = list(engine.shards.pieces)
    state = sum(
        value.nbytes
        for one in pieces
        for value in engine.shards.state.get(one.proxy, {}).values()
        if isinstance(value, torch.Tensor)
    )
    return state / max(1, sum(one.proxy.nbytes for one in pieces))


def layers_of(units: Sequence[Sequence[int]], behind: int = 0) -> dict[int, int]:
    """The layer of each slot; `behind` more layers come before the first."""
    return {index: behind + layer for layer, unit in enumerate(units) for index in unit}


def work_of(engine: Engine, times: Times, units: Sequence[Sequence[int]], *, bare: bool = False) -> Workload:
    """The workload that a simulation runs; `bare`: without the costs of our own code."""
    sizes = [[engine.slots[index].param.nbytes for index in unit] for unit in units]
    made = bare_workload if bare else workload
    return made(times, sizes, [engine.slots[unit[0]].name for unit in units])


def in_a_line(name: str, report: Report) -> str:
    kept = report.setting == report.before
    what = (
        f"{describe(report.setting)} stays" if kept else f"{describe(report.before)} becomes {describe(report.setting)}"
    )
    return (
        f"{name}: {what}. A step took {1e3 * report.measured:.4g} ms; simulated are {1e3 * report.simulated_before:.4g}, "
        f"and {1e3 * report.simulated:.4g} ms with the best of {report.tried} settings"
    )
