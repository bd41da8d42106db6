"""DeAR: all-reduce taken apart, reduce-scatter under backward and all-gather under the next forward."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from typing_extensions import Unpack

from dear.schedule import plan_buckets
from dear.siblings import OwnOptions
from overlap.core.bucket import Bucket
from overlap.core.wire import DecoupledCollectives
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import current
from overlap.optimizer.arguments import SharedArguments, refuse_unknown
from overlap.optimizer.dears_arguments import understands_dears_names
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.optimizer.start import agree_on_strategy
from overlap.optimizer.tuning import tune as start_tuning
from overlap.plan.fusion import limits, trained_bytes
from overlap.plan.partition import TensorSpec
from overlap.plan.plan import Facts, Plan, Updates
from overlap.plan.strategy import Collectives, Strategy
from overlap.plan.tuning.options import Tuning
from overlap.plan.tuning.space import Dimension, Setting
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.compression import NoneCompressor

__all__ = ["Dear", "DistributedOptimizer"]

_PARTS = {"rsag": ("reducescatter", "allgather"), "rb": ("reduce", "bcast")}  # the two halves, by policy


class Breakdown(DecoupledCollectives):
    """Without some parts of the communication: what they cost is the difference. The training is wrong."""

    def __init__(self, *, reduces: bool, gathers: bool) -> None:
        self._reduces, self._gathers = reduces, gathers

    def reduce(self, comm: Communicator, bucket: Bucket) -> None:
        if self._reduces:
            super().reduce(comm, bucket)
        elif bucket.holds_parameters:
            bucket.incoming.copy_(bucket.outgoing[bucket.own])

    def gather(self, comm: Communicator, bucket: Bucket) -> None:
        if self._gathers:
            super().gather(comm, bucket)


class Dear(Strategy):
    """Reduce-scatter as buckets fill, the update on this rank's shard, all-gather awaited layer by layer.

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
        self.threshold_mb, self.num_nearby_layers, self.policy = threshold_mb, num_nearby_layers, policy
        self.updates = Updates.EAGER if eager else Updates.SHARDED
        self.excluded, self.complete, self.gather_dtype = excluded, not excluded, gather_dtype
        self.carries = self.complete and policy == "rsag"

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
            "policy": self.policy,
            "exclude_parts": sorted(self.excluded),
            "gather_dtype": self.gather_dtype,
        }

    @property
    def collectives(self) -> Collectives | None:
        if self.complete:
            return None
        reduces, gathers = (part not in self.excluded for part in _PARTS[self.policy])
        return Breakdown(reduces=reduces, gathers=gathers)

    def at(self, setting: Setting) -> Dear:
        other = copy.copy(self)
        other.threshold_mb = setting["threshold_mb"]
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
    gather_dtype: torch.dtype | None = None,
    tune: bool | Tuning = False,
    strategy: str = "dear",
    elementwise: bool | None = None,
    per_parameter: bool | None = None,
    sync_start: bool = True,
    poison: bool | None = None,
    broadcast_buffers: bool = True,
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
            ``HOROVOD_FUSION_THRESHOLD`` (bytes), says; else a 32nd of the parameters that are trained, at least 1 and at
            most 25, see [Note: how much to fuse] in `overlap.plan.fusion`. 25 is the paper's.
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
        gather_dtype: ``torch.bfloat16`` or ``torch.float16``: updated parameters travel, and are used by every rank,
            rounded to this type, half the bytes; they stay float32 (or 64) tensors. The exact values are kept, each by
            the rank that updates it, and saved in ``optimizer.state_dict()["master"]``. For gradients, which
            `compression` narrows, FSDP's word is ``reduce_dtype``; this is its counterpart. Raises ``ValueError`` for
            optimizers that need whole parameters, ``TypeError`` for parameters of other types.
        tune: True or ``Tuning(...)`` searches the `threshold_mb` with the shortest steps, 1 to 256 unless told otherwise,
            while training goes on; the results of training stay the same. See :class:`overlap.plan.tuning.options.Tuning`.
        strategy: ``"dear"``, or the name of another strategy's package (``"wfbp"``, ``"mgwfbp"``,
            ``"bytescheduler_adapter"``, ``"oss"``, or ``"co2"``, which is not synchronous), which then takes the
            other arguments.
        others: options of that strategy's own. Any other name raises ``TypeError``, with the one that is meant.
        elementwise: this, and `per_parameter`, `sync_start`, `poison`, `broadcast_buffers`: see
            :class:`overlap.optimizer.arguments.SharedArguments`.
    """
    arguments = SharedArguments.of(locals())
    if strategy == "dear":
        refuse_unknown(others, _NAMES)
    own: dict[str, Any] = {
        "threshold_mb": threshold_mb,
        "num_nearby_layers": num_nearby_layers,
        "exclude_parts": exclude_parts,
        "policy": policy,
        "eager": eager,
        "gather_dtype": gather_dtype,
    }
    if strategy != "dear":
        theirs = {**vars(arguments), **others, **({} if tune is False else {"tune": tune})}
        return _sibling(strategy, optimizer, named_parameters, own, theirs)
    agree_on_strategy("dear", tune)
    wished_mb = current().settings.threshold_mb if threshold_mb == "auto" else None
    own["threshold_mb"], own["num_nearby_layers"] = limits(
        threshold_mb if wished_mb is None else wished_mb, num_nearby_layers, trained_bytes(optimizer)
    )
    distributed = Shell(optimizer, named_parameters, Dear(**own), arguments)
    start_tuning(distributed, tune, process_set)
    return distributed


_NAMES = tuple(name for name in inspect.signature(DistributedOptimizer).parameters if name != "others")
_DEFAULTS: dict[str, Any] = dict(inspect.unwrap(DistributedOptimizer).__kwdefaults__ or {})
_SIBLINGS = ("bytescheduler_adapter", "co2", "mgwfbp", "oss", "wfbp")


def _sibling(strategy: str, optimizer: torch.optim.Optimizer, model: Any, own: dict[str, Any], theirs: Any) -> Shell:
    if strategy not in _SIBLINGS:
        raise ValueError(f"strategy should be 'dear' or one of {_SIBLINGS} and is {strategy!r}")
    make = importlib.import_module(strategy).DistributedOptimizer
    takes = inspect.signature(make).parameters
    chosen = {name: value for name, value in own.items() if value is not _DEFAULTS[name]}
    foreign = [f"{name}={value!r}" for name, value in chosen.items() if name not in takes]
    if foreign:
        raise ValueError(f"{', '.join(foreign)}: arguments that belong to 'dear', not to {strategy!r}")
    if "tune" in theirs and "tune" not in takes:
        raise ValueError(f"strategy {strategy!r} has nothing to tune; leave tune=False")
    return make(optimizer, model, **chosen, **theirs)
