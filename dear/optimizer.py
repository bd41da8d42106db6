"""DeAR: all-reduce split in two, reduce-scatter under backward and all-gather under the next forward."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from typing_extensions import Unpack

from dear.schedule import plan_buckets
from dear.siblings import OwnOptions
from overlap.core.bucket import Bucket
from overlap.core.wire import DecoupledCollectives
from overlap.job.groups import ShardGroups
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import current
from overlap.optimizer.arguments import SharedArguments, refuse_unknown, suggested
from overlap.optimizer.dears_arguments import understands_dears_names
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.optimizer.planning import plan_by_itself
from overlap.optimizer.start import agree_on_strategy
from overlap.optimizer.tuning import tune as start_tuning
from overlap.plan.fusion import limits, size_and_device
from overlap.plan.partition import TensorSpec
from overlap.plan.plan import Facts, Plan, Updates
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.methods import SIZES_MB, sizes_near
from overlap.plan.simulation.network import Medium
from overlap.plan.simulation.schedules import decoupled
from overlap.plan.simulation.workload import Bucket as PlannedBucket
from overlap.plan.simulation.workload import Workload
from overlap.plan.strategy import Collectives, PlannedStrategy
from overlap.plan.tuning.options import Tuning
from overlap.plan.tuning.space import Dimension, Setting
from overlap.state.elementwise import divisible
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.compression import NoneCompressor

__all__ = ["Dear", "DistributedOptimizer"]

_SHARE_STEPS = (-1 / 8, -1 / 16, 1 / 16, 1 / 8)  # by which it varies the share of buckets that are all-reduced …
_LARGEST_SHARE = 0.5  # … to no more than this: ranks keep the whole optimizer state of that share
_PARTS = {"rsag": ("reducescatter", "allgather"), "rb": ("reduce", "bcast")}  # the two halves, by policy


class Breakdown(DecoupledCollectives):
    """DeAR's collectives with reductions or all-gathers left out, to measure what each of them costs.

    The training is wrong.
    """

    def __init__(self, *, reduces: bool, gathers: bool) -> None:
        self._reduces, self._gathers = reduces, gathers

    def reduce(self, comm: Communicator, bucket: Bucket) -> None:
        if self._reduces:
            super().reduce(comm, bucket)
        elif bucket.sharded:
            bucket.incoming.copy_(bucket.outgoing[bucket.own])

    def gather(self, comm: Communicator, bucket: Bucket) -> bool:
        return self._gathers and super().gather(comm, bucket)


class Dear(PlannedStrategy):
    """DeAR's strategy: buckets are reduce-scattered as they fill, updated in shards, and all-gathered layer by layer.

    With the policy "rb", a shard is a whole bucket: reduced to the rank that owns it, updated there, and broadcast.
    Optimizers that need whole parameters get whole gradients instead: their buckets are all-reduced under backward.
    """

    name = "dear"

    def __init__(
        self,
        threshold_mb: float | None,
        num_nearby_layers: int | None,
        exclude_parts: str,
        policy: str,
        eager: bool,
        gather_dtype: torch.dtype | None,
        all_reduced: float = 0.0,
        auto: frozenset[str] = frozenset(),
        shard_group: ShardGroups = None,
        residency: str | None = None,
    ) -> None:
        if threshold_mb is None and num_nearby_layers is None:
            raise ValueError(
                "threshold_mb and num_nearby_layers are both None: give at least one, e.g. threshold_mb=None, "
                "num_nearby_layers=1 for no tensor fusion"
            )
        if threshold_mb is not None and not threshold_mb > 0:
            raise ValueError(f"threshold_mb should be at least 0 and is {threshold_mb}")
        if num_nearby_layers is not None and num_nearby_layers < 1:
            raise ValueError(f"num_nearby_layers should be at least 1 and is {num_nearby_layers}")
        if policy not in _PARTS:
            raise ValueError(f"policy should be one of {sorted(_PARTS)} and is {policy!r}")
        excluded = frozenset(exclude_parts.replace(",", " ").split())
        strangers = sorted(excluded.difference(_PARTS[policy]))
        if strangers:
            raise ValueError(f"exclude_parts should name {' or '.join(_PARTS[policy])} and names {strangers}")
        if not 0 <= all_reduced <= 1:
            raise ValueError(
                f"all_reduced should be a share of the buckets, from 0 to 1, or 'auto', and is {all_reduced}"
            )
        if all_reduced and (policy != "rsag" or gather_dtype is not None or excluded):
            raise ValueError(
                f"all_reduced={all_reduced} has every rank update a part of the buckets in full, which cannot be done with "
                "policy='rb', gather_dtype or exclude_parts; leave one of them out"
            )
        if shard_group is not None and policy != "rsag":
            raise ValueError(
                f"shard_group={shard_group} shards buckets, and policy={policy!r} gives each to one rank: give one"
            )
        if residency not in (None, "host"):
            raise ValueError(
                f"residency should be 'host', or None for parameters of each rank's own, and is {residency!r}"
            )
        beside = {
            "policy='rb'": policy == "rb",
            "eager=True": eager,
            f"{gather_dtype=}": gather_dtype is not None,
            f"{shard_group=}": shard_group is not None,
            f"{all_reduced=}": all_reduced != 0,
            f"{exclude_parts=}": bool(excluded),
        }
        if residency is not None and any(beside.values()):
            given = ", ".join(name for name, there in beside.items() if there)
            raise ValueError(f"residency={residency!r} does not go together with {given}: leave one of them out")
        self.threshold_mb, self.num_nearby_layers, self.policy = threshold_mb, num_nearby_layers, policy
        self.shard_group, self.on_host = shard_group, residency == "host"
        self.all_reduced = all_reduced
        self.auto = auto  # what a planner may choose: "threshold_mb", "all_reduced"
        self.updates = Updates.EAGER if eager else Updates.SHARDED
        self.excluded, self.complete, self.gather_dtype = excluded, not excluded, gather_dtype
        self.carries = self.complete and policy == "rsag"

    @property
    def planned(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in sorted(self.auto)}

    @property
    def candidates(self) -> Sequence[Dear]:
        return [self._with(threshold_mb=mb) for mb in SIZES_MB] if "threshold_mb" in self.auto else ()

    @property
    def neighbours(self) -> Sequence[Dear]:
        near: list[Dear] = []
        if "all_reduced" in self.auto:
            shares = [self.all_reduced + step for step in _SHARE_STEPS]
            near += [self._with(all_reduced=share) for share in shares if 0 <= share <= _LARGEST_SHARE]
        if "threshold_mb" in self.auto and self.threshold_mb is not None:
            near += [self._with(threshold_mb=mb) for mb in sizes_near(self.threshold_mb)]
        return near

    @property
    def burden(self) -> tuple[float, ...]:
        return (self.all_reduced, -(self.threshold_mb or 0.0))

    def simulate(
        self, work: Workload, network: Medium, buckets: Sequence[PlannedBucket], whole: Collection[int]
    ) -> Run:
        return decoupled(work, network, buckets, whole=whole, steps=4)

    @property
    def space(self) -> tuple[Dimension, ...]:
        return () if self.threshold_mb is None else (Dimension("threshold_mb", 1, 256),)

    @property
    def setting(self) -> dict[str, float]:
        return {} if self.threshold_mb is None else {"threshold_mb": self.threshold_mb}

    @property
    def terms(self) -> dict[str, Any]:
        return {
            "threshold_mb": self.threshold_mb,
            "num_nearby_layers": self.num_nearby_layers,
            "all_reduced": self.all_reduced,
            "policy": self.policy,
            "exclude_parts": sorted(self.excluded),
            "gather_dtype": self.gather_dtype,
            "shard_group": self.shard_group,
            "on_host": self.on_host,
            "planned": sorted(self.planned),  # only some ranks would measure
        }

    @property
    def collectives(self) -> Collectives | None:
        if self.complete:
            return None
        reduces, gathers = (part not in self.excluded for part in _PARTS[self.policy])
        return Breakdown(reduces=reduces, gathers=gathers)

    def at(self, setting: Setting) -> Dear:
        return self._with(**setting)

    def _with(self, **values: float) -> Dear:
        other = copy.copy(self)
        vars(other).update(values)
        return other

    def plan(self, facts: Facts, specs: Sequence[TensorSpec], shardable: Sequence[bool], world_size: int) -> Plan:
        threshold_bytes = None if self.threshold_mb is None else self.threshold_mb * 2**20
        return plan_buckets(
            facts,
            specs,
            shardable,
            world_size,
            threshold_bytes=threshold_bytes,
            num_nearby_layers=self.num_nearby_layers,
            one_owner=self.policy == "rb",
            all_reduced=self.all_reduced,
            residency=self.residency,
        )


@understands_dears_names
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = NoneCompressor,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVG,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    threshold_mb: float | Literal["auto"] | None = "auto",
    num_nearby_layers: int | None = None,
    exclude_parts: str = "",
    policy: str = "rsag",
    eager: bool = False,
    all_reduced: float | Literal["auto"] = "auto",
    gather_dtype: torch.dtype | None = None,
    shard_group: ShardGroups = None,
    residency: Literal["host"] | None = None,
    tune: bool | Tuning = False,
    strategy: str = "dear",
    elementwise: bool | None = None,
    per_parameter: bool | None = None,
    sync_start: bool = True,
    poison: bool | None = None,
    broadcast_buffers: bool = True,
    check_every: int | None = None,
    on_nonfinite: str = "raise",
    **others: Unpack[OwnOptions],
) -> Shell:
    """Distribute `optimizer` with DeAR's schedule. On every rank, after ``dear.init()``.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: the module, or pairs of name and parameter, or None.
        compression: this, and what follows up to `process_set`: as in Horovod; see
            :class:`overlap.optimizer.arguments.HorovodArguments`.
        threshold_mb: layers are fused, in the order of their use, while a bucket stays below this many MB (2^20 bytes); 0:
            no fusion. ``"auto"``: what the environment variable ``DEAR_THRESHOLD_MB`` (MB), or
            ``HOROVOD_FUSION_THRESHOLD`` (bytes), says; else it is planned: the first steps have a 32nd of the parameters
            that are trained, an eighth on a GPU, at least 1 and at most 25 ([Note: how much to fuse] in
            `overlap.plan.fusion`); they are measured, and what follows is simulated to be the fastest, from 1 to 64. 25 is
            the paper's.
        num_nearby_layers: at most this many layers per bucket; with both limits, the first one reached closes a bucket.
            ``threshold_mb=None, num_nearby_layers=1`` is DeAR without tensor fusion.
        exclude_parts: ``"reducescatter"``, ``"allgather"`` or both (``"reduce"``, ``"bcast"`` under the policy "rb")
            leave that part of the communication out, for time breakdowns. The training is wrong then.
        policy: how an all-reduce is taken apart. ``"rsag"``: reduce-scatter and all-gather. ``"rb"``, for comparison:
            each bucket is reduced to one rank, in turn, updated there in full and broadcast.
        eager: update and gather a part of the layers while backward still runs, where the wire has a gap. Results are
            the same. It needs many buckets to choose from: a threshold of a few MB, or ``"auto"``.
            What needs old parameters or all gradients between backward and ``step()`` raises: clipping by a global norm,
            ``synchronize()``, skipped steps, ``state_dict()``, changed hyper-parameters, reading parameters. Raises
            ``ValueError`` for optimizers that need whole parameters.
        all_reduced: the share of the buckets, from 0 to 1, that are all-reduced under backward and updated in full by every
            rank, instead of gathered under the next forward. Results are the same. Each rank keeps the whole optimizer
            state of that share. ``"auto"``: planned, up to a half, where `threshold_mb` is; else 0. Raises ``ValueError``
            for more than 0 with `policy` "rb", `gather_dtype` or `exclude_parts`.
        gather_dtype: ``torch.bfloat16`` or ``torch.float16``: updated parameters travel, and are used by every rank,
            rounded to this type, half the bytes; they stay float32 (or 64) tensors. The exact values are kept, each by
            the rank that updates it, and saved in ``optimizer.state_dict()["master"]``. For gradients, which
            `compression` narrows, FSDP's word is ``reduce_dtype``; this is its counterpart. Raises ``ValueError`` for
            optimizers that need whole parameters, ``TypeError`` for parameters of other types.
        shard_group: updates are sharded among so many neighbouring ranks, or among those of a ``"host"``, or within each of
            these groups of ranks, and averaged over all groups: parameters are gathered inside a group. `threshold_mb` is
            not planned then. None: among all ranks.
        residency: ``"host"``: whole parameters lie once in the memory of each host, not once for each rank, and whole
            gradients have memory until they are reduced. Results are the same. A script that writes to parameters outside
            of steps writes to the copy of all ranks of its host: the same values on every rank (``copy_``), not changes
            (``add_``). Raises ``ValueError`` for hosts with different numbers of
            ranks, or with one each, for parameters on a GPU, optimizers that need whole parameters, and with `policy`
            "rb", `eager`, `gather_dtype`, `shard_group`, `all_reduced`, `exclude_parts` or a `process_set`.
        tune: True or ``Tuning(...)`` searches the `threshold_mb` with the shortest steps, 1 to 256 unless told otherwise,
            while training goes on; the results of training stay the same. See :class:`overlap.plan.tuning.options.Tuning`.
        strategy: ``"dear"``, or the name of another strategy's package (``"wfbp"``, ``"mgwfbp"``,
            ``"bytescheduler_adapter"``, ``"oss"``, ``"fsdp"``, ``"osdp"``, or ``"co2"``, which is not synchronous), which
            then takes the other arguments. ``"auto"``: ``"oss"`` for optimizers that need whole parameters, one by one
            (Adafactor, Muon, SparseAdam of ``torch.optim``; others with `per_parameter`), so that their state is split, and
            ``"dear"`` for all others.
        others: options of that strategy's own. Any other name raises ``TypeError``, with the one that is meant.
        elementwise: this, and `per_parameter`, `sync_start`, `poison`, `broadcast_buffers`, `check_every`,
            `on_nonfinite`: see :class:`overlap.optimizer.arguments.SharedArguments`.
    """
    arguments = SharedArguments.of(locals())
    if strategy == "auto":
        strategy = _suited(optimizer, arguments)
    if strategy == "dear":
        refuse_unknown(others, _NAMES)
    own: dict[str, Any] = {
        "threshold_mb": threshold_mb,
        "num_nearby_layers": num_nearby_layers,
        "exclude_parts": exclude_parts,
        "policy": policy,
        "eager": eager,
        "all_reduced": all_reduced,
        "gather_dtype": gather_dtype,
        "shard_group": shard_group,
        "residency": residency,
    }
    if strategy != "dear":
        theirs = {**vars(arguments), **others, **({} if tune is False else {"tune": tune})}
        return _sibling(strategy, optimizer, named_parameters, own, theirs)
    agree_on_strategy("dear", tune)
    if exclude_parts:  # what is not sent may be anything
        arguments = replace(arguments, on_nonfinite="ignore")
    wished_mb = current().settings.threshold_mb if threshold_mb == "auto" else None
    plain = not (eager or exclude_parts or shard_group) and policy == "rsag" and num_nearby_layers is None
    auto = set() if threshold_mb != "auto" or wished_mb not in (None, "auto") or not plain else {"threshold_mb"}
    if auto and all_reduced == "auto" and gather_dtype is None and residency is None:
        auto.add("all_reduced")
    own["threshold_mb"], own["num_nearby_layers"] = limits(
        threshold_mb if wished_mb is None else wished_mb, num_nearby_layers, *size_and_device(optimizer)
    )
    own["all_reduced"] = 0.0 if all_reduced == "auto" else all_reduced
    distributed = Shell(optimizer, named_parameters, Dear(**own, auto=frozenset(auto)), arguments)
    planning = plan_by_itself(distributed, process_set, follow=tune is False) if auto else None
    start_tuning(distributed, tune, process_set, ready=lambda: planning is None or not planning.under_way)
    return distributed


def _suited(optimizer: torch.optim.Optimizer, arguments: SharedArguments) -> str:
    """The strategy that splits this optimizer's state: `dear` what works element by element, `oss` by whole parameters.

    `dear` where neither does; its plan all-reduces as `wfbp` does then. Others with equal results are no faster than it.
    """
    elementwise, per_parameter = divisible(optimizer, arguments.elementwise, arguments.per_parameter)
    return "oss" if per_parameter and not elementwise else "dear"


_NAMES = tuple(name for name in inspect.signature(DistributedOptimizer).parameters if name != "others")
_DEFAULTS: dict[str, Any] = dict(inspect.unwrap(DistributedOptimizer).__kwdefaults__ or {})
_SIBLINGS = ("bytescheduler_adapter", "co2", "fsdp", "mgwfbp", "osdp", "oss", "wfbp")


def _sibling(strategy: str, optimizer: torch.optim.Optimizer, model: Any, own: dict[str, Any], theirs: Any) -> Shell:
    if strategy not in _SIBLINGS:
        known = ("dear", "auto", *_SIBLINGS)
        raise ValueError(
            f"strategy should be one of {', '.join(known)} and is {strategy!r}{suggested(strategy, known)}"
        )
    make = importlib.import_module(strategy).DistributedOptimizer
    takes = inspect.signature(make).parameters
    chosen = {name: value for name, value in own.items() if value is not _DEFAULTS[name]}
    foreign = [f"{name}={value!r}" for name, value in chosen.items() if name not in takes]
    if foreign:
        raise ValueError(f"{', '.join(foreign)}: arguments that belong to 'dear', not to {strategy!r}; leave them out")
    if "tune" in theirs and "tune" not in takes:
        raise ValueError(f"strategy {strategy!r} has nothing to tune; leave tune=False")
    return make(optimizer, model, **chosen, **theirs)
