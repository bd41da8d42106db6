"""Explains in a dozen lines what a plan rests on, what it costs and what would help; draws simulated steps (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from overlap.plan.simulation.events import Run
from overlap.plan.simulation.methods import METHODS
from overlap.plan.simulation.network import Fitted
from overlap.plan.simulation.workload import Workload
from overlap.plan.tuning.space import describe
from overlap.trace.picture import Bar, Row

__all__ = ["NO_PLAN", "Explained", "explanation", "rows"]

NO_PLAN = (
    "there is no plan to explain: an option (threshold_mb, eager, policy, …) or replan() has chosen the buckets, or there "
    "is one rank, for which nothing is measured"
)

_OTHERS = ("wfbp", "bytescheduler", "DDP")  # of the simulation, with the settings that they have as they come
_LATE = 1.05  # a rank that computes so much longer than the median is named
_WORTH = 0.97  # what would help is said where a step would take less than this share
_LONGEST = 3  # waits that are named
_SIMULATED = 1.1  # a measured step that is so much longer than the simulated one is commented upon


@dataclass(frozen=True, kw_only=True)
class Explained:
    """The facts behind an explanation. `simulate` runs a step of the plan on a network."""

    strategy: str
    ranks: int
    setting: Mapping[str, float]
    buckets: int
    whole: int  # of them, all-reduced under backward and updated in full by every rank
    work: Workload  # with what is ours …
    model: Workload  # … and without
    network: Fitted
    computed: Sequence[float]  # seconds by rank, without communication; 0 where nothing was measured
    hooks: float  # seconds of gates and of hooks, which copy gradients and may compress them
    issuing: float  # … of issuing and awaiting operations
    updates: float  # … of the optimizer, for what this rank updates
    before: float  # seconds of a step without the plan, measured …
    again: bool  # … once more, after it
    after: float | None  # … and with it
    simulate: Callable[[Workload, Fitted], Run]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.4g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"


def _wire(work: Workload, network: Fitted) -> float:
    return network.reduce_scatter(work.nbytes).transfer + network.all_gather(work.nbytes).transfer


def explanation(told: Explained) -> str:
    """The explanation as text: network, computation, bound, plan, step, what is not hidden, and what would help."""
    work, network = told.work, told.network
    wire = _wire(work, network)
    compute = sum(layer.forward + layer.backward for layer in told.model.layers)
    bound, run = max(compute, wire), told.simulate(work, network)
    measured = told.before if told.after is None else told.after
    lines = {
        "network": f"an all-reduce of the {work.nbytes / 2**20:,.1f} MB of gradients takes {_ms(wire)}, "
        f"and {1e6 * 2 * network.start:,.0f} us for each bucket"
        if wire
        else "nothing was sent",
        "computation": _computation(told.model, compute),
        "bound": f"{_ms(bound)}: no schedule that computes this and sends these bytes is faster",
        "plan": f"{describe(told.setting)}: {told.buckets} buckets"
        + (f", of which {told.whole} are all-reduced under backward and updated in full" if told.whole else ""),
        "step": f"{_ms(measured)} measured, {measured / bound:.2f} x the bound; {_ms(run.step)} simulated"
        + _other_step(told),
        "overhead": f"{_ms(told.hooks + told.issuing)}: hooks, and copies of gradients, {_ms(told.hooks)}; issuing and "
        f"awaiting operations {_ms(told.issuing)}",
        "update": f"{_ms(told.updates)}: the optimizer, for what a rank updates",
        "not hidden": _not_hidden(run),
        "ranks": _ranks(told.computed),
        "others": _others(told),
        "would help": _helpful(told, run.step),
    }
    if measured > _SIMULATED * run.step:
        lines["difference"] = (
            f"{_ms(measured - run.step)} of a step are not in the simulation: other work on the cores that move the bytes, "
            "pauses that come and go, or ranks that wait for each other"
        )
    width = max(map(len, lines))
    head = f"{told.strategy} on {told.ranks} ranks"
    return "\n".join([head, *(f"  {name:<{width}}  {line}" for name, line in lines.items() if line)])


def _computation(model: Workload, compute: float) -> str:
    """Of the model alone. What has no tensors is around it: a data loader's time, the loss."""
    own = [layer for layer in model.layers if layer.tensors]
    forward, backward = sum(layer.forward for layer in own), sum(layer.backward for layer in own)
    around = f", around them {_ms(compute - forward - backward)}"
    return f"{_ms(compute)}: forward {_ms(forward)}, backward {_ms(backward)}{around}"


def _other_step(told: Explained) -> str:
    """What a step takes without the plan, and which measurement the figures are of, if it was not the first."""
    if told.after is None:
        return "; measured once more, as another plan was tried and was slower" if told.again else ""
    return f"; {_ms(told.before)} " + ("without the plan, measured after it" if told.again else "before the plan")


def _others(told: Explained) -> str:
    named = (name for name in _OTHERS if not told.strategy.startswith(name))
    said = "; ".join(f"{name} {_ms(_simulated(told, name))}" for name in named)
    return f"{said}, simulated, DDP without overhead of its own"


def _simulated(told: Explained, name: str) -> float:
    """Hooks and copies are ours, and so are the methods, but for DDP."""
    return METHODS[name](told.model if name == "DDP" else told.work, told.network).step


def _not_hidden(run: Run) -> str:
    longest = sorted(run.waits.items(), key=lambda item: -item[1])[:_LONGEST]
    rest = run.waited - sum(seconds for _, seconds in longest)
    parts = [f"{label} {_ms(seconds)}" for label, seconds in longest]
    if rest > 0 and parts:
        parts.append(f"others {_ms(rest)}")
    return f"waits {_ms(run.waited)}" + (f" ({', '.join(parts)}; 0 is nearest the input)" if parts else "")


def _ranks(computed: Sequence[float]) -> str:
    known = [seconds for seconds in computed if seconds]
    if not known:
        return ""
    middle = statistics.median(known)
    late = [f"rank {rank} ({_ms(seconds)})" for rank, seconds in enumerate(computed) if seconds > _LATE * middle]
    alike = f"the median computes for {_ms(middle)}"
    return f"{alike}; longer: {', '.join(late)}, for which all wait" if late else f"{alike}, and none for much longer"


def _helpful(told: Explained, step: float) -> str:
    work, network = told.work, told.network
    ideas = {
        "compression=Compression.bf16 (rounds gradients)": (work, replace(network, reduce=network.reduce / 2)),
        "a network twice as fast": (work, replace(network, reduce=network.reduce / 2, gather=network.gather / 2)),
        "co2, which does not wait (other results)": (work, replace(network, start=0.0, reduce=0.0, gather=0.0)),
    }
    found = [(name, told.simulate(*what).step) for name, what in ideas.items()]
    said = [f"{name}: {_ms(seconds)}" for name, seconds in found if seconds < _WORTH * step]
    return "; ".join(said) if said else "a faster computer: communication is hidden"


def rows(run: Run) -> list[Row]:
    """For `overlap.trace.picture.draw_rows`: what the thread does, and what is on the wire, in milliseconds."""
    kinds = {"reduce-scatter": "reduce_scatter", "all-gather": "all_gather", "all-reduce": "all_reduce", "wait": "wait"}
    short = {"reduce-scatter": "RS", "all-gather": "AG", "all-reduce": "AR", "wait": "wait"}

    def bar(label: str, begun: float, ended: float) -> Bar:
        words = label.split()
        kind = kinds.get(words[0], words[0])
        return Bar(" ".join(short.get(word, word) for word in words), kind, 1e3 * begun, 1e3 * (ended - begun))

    titles = {
        "thread": "computation",
        "reductions": "reductions",
        "all-reduces": "all-reduces",
        "gathers": "all-gathers",
    }
    names = sorted({one.row for one in run.spans})  # a lane's is that of its kind, and more
    return [
        Row(
            titles[kind] + name.removeprefix(kind),
            tuple(bar(one.label, one.begun, one.ended) for one in run.spans if one.row == name),
        )
        for kind in titles
        for name in names
        if name.startswith(kind)
    ]
