"""``Pipe`` across ranks: each has a stage, over torch's pipelining, and ranks beside it average the gradients of theirs.

            step 1                                                   step 2
stage 0     F0 F1 F2 F3             B0    B1    B2    B3 ─ reduce ─▶ F0 …      gathers end in the bubble of
stage 1        F0 F1 F2       B0 F3 B1    B2    B3 ─ reduce ─▶          F0 …   the next step

With an interleaved schedule a rank has several stages: of n ranks, rank r has the stages r, r + n, r + 2n …

Stage 0 tells the others of each batch before it begins, so that what is wrong with it raises on all of them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from overlap.job.axes import Axis, Part, axis_of, set_part
from overlap.job.session import current
from overlap.trace.phases import micro_batch
from overlap.transport.objects import allgather_object, broadcast_object
from pipe.balance import balanced, layer_seconds
from pipe.carried import Carrier, crossings
from pipe.causal import CausalStage, blocks_of, is_causal_model
from pipe.failing import Failing
from pipe.measured import Measured
from pipe.micro_batches import cut, put_together
from pipe.pipe import Pipe, checked_balance
from pipe.progress import BACKWARD, FORWARD, Message, Progress, progress_of_job
from pipe.schedule import stand_in
from pipe.skip import Key, verify_skippables
from pipe.ties import Borrowed, Tie, ties_between

if TYPE_CHECKING:
    from overlap.horovod.mesh import Mesh

__all__ = ["SCHEDULES", "StagePipe"]

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "loopedbfs": ScheduleLoopedBFS,
}
_INTERLEAVED = ("interleaved1f1b", "loopedbfs")  # in which a rank may have several stages

Loss = Callable[[Any, Any], torch.Tensor]


class _Stage(PipelineStage):
    """torch's stage, of which distributed optimizers reduce in the last backward pass of a step alone."""

    progress: Progress
    optimizers: Sequence[Any] = ()
    borrowed: Sequence[Borrowed] = ()
    measured: Measured | None = None
    concludes = True  # its last backward pass is that of its rank; freed buckets are reduced there, of all stages, once
    _buffers: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    @property
    def carrier(self) -> Carrier:
        return cast(Carrier, self.submod)

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        """Shapes of the output, or of gradients of the input; with the first go the structures around tensors."""
        super()._send_meta((meta, self.carrier.made) if dst_stage > self.stage_index else meta, dst_stage)

    def _recv_meta(self, src_stage: int) -> Any:
        found = super()._recv_meta(src_stage)
        if src_stage < self.stage_index:
            found, self.carrier.given = found
        return found

    def _to_tensor(self, arg: Any) -> torch.Tensor:
        """What a stage is called with for shapes: numbers by which nothing is looked up that is not there."""
        found = super()._to_tensor(arg)
        if not isinstance(arg, torch.Tensor):
            with torch.no_grad():
                found.zero_()
        return found

    def _compute_outputs(self, *args: Any, module: torch.nn.Module, **named: Any) -> Any:
        """torch's call before the first micro-batch, for shapes alone: what forward writes into buffers is taken back."""
        self._buffers = [(each, each.detach().clone()) for each in module.buffers()]
        with self.progress.computing(f"forward, for shapes, in stage {self.stage_index}"):
            return super()._compute_outputs(*args, module=module, **named)

    def _compute_input_grads(self, *args: Any, **named: Any) -> Any:
        """torch's, for shapes: gradients are sent as they lie in ``.grad``, and not in strides of the moment."""
        with self.progress.computing(f"backward, for shapes, in stage {self.stage_index}"):
            found = super()._compute_input_grads(*args, **named)
        return tuple(None if each is None else each.contiguous() for each in found)

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        self._buffers = ()

    def _expect(self, before: str, number: int, source: int) -> None:
        rank = self._resolve_peer_global_rank(source)
        self.progress.expect(Message(before, number, self.stage_index, source, rank))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        if not self.is_first:
            self._expect(FORWARD, fwd_chunk_id, self.stage_index - 1)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward and not self.is_last:
            self._expect(BACKWARD, bwd_chunk_id, self.stage_index + 1)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        timed = nullcontext() if self.measured is None else self.measured.computing()
        with micro_batch(fwd_chunk_id), self.progress.working(FORWARD, fwd_chunk_id, self.stage_index), timed:
            return super().forward_one_chunk(fwd_chunk_id, *args, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        timed = nullcontext() if self.measured is None else self.measured.computing()
        with micro_batch(bwd_chunk_id), self.progress.working(BACKWARD, bwd_chunk_id, self.stage_index), timed:
            return super().backward_one_chunk(bwd_chunk_id, *args, **named)

    def _prepare_backward_infra(self, *args: Any, **named: Any) -> Any:
        """Before batches of a new shape, torch goes backward once to learn what is sent; no gradient comes of it."""
        with local(self.optimizers):
            return super()._prepare_backward_infra(*args, **named)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if not last_backward:
            with local(self.optimizers):
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        take_back(self.borrowed, self.optimizers)
        with local(() if self.concludes else [each for each in self.optimizers if each._engine.unsharder.active]):
            found = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        for each in self.borrowed:
            if not each.owns:
                each.give_back()
        return found


def local(optimizers: Sequence[Any]) -> ExitStack:
    """A context in which backward passes leave gradients of these optimizers on this rank."""
    stack = ExitStack()
    for optimizer in optimizers:
        stack.enter_context(optimizer.no_sync())
    return stack


def take_back(borrowed: Sequence[Borrowed], optimizers: Sequence[Any]) -> None:
    """Add what other stages have of the gradients of parameters that they have borrowed from this one."""
    with local(optimizers):
        for each in borrowed:
            if each.owns:
                each.take_back()


class StagePipe(Pipe):
    """What ``Pipe(module, balance, mesh=mesh, …)`` makes, on every rank of the job: see :class:`.Pipe`."""

    def __init__(
        self,
        module: torch.nn.Module,
        balance: Sequence[int] | str,
        *,
        mesh: Mesh,
        chunks: int = 1,
        schedule: str = "1f1b",
        loss: Loss | None = None,
        sample: Any = None,
        **others: Any,
    ) -> None:
        torch.nn.Module.__init__(self)
        if others:
            names = ", ".join(others)
            raise NotImplementedError(f"{names}: of a Pipe in one process; with a mesh, leave it out")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule should be one of {', '.join(map(repr, SCHEDULES))} and is {schedule!r}")
        if chunks < 1:
            raise ValueError(f"chunks should be at least 1 and is {chunks}")
        if "pipeline" not in mesh.axes:
            raise ValueError(f"{mesh} has no axis 'pipeline', whose ranks have a stage each")
        self.chunks, self.schedule, self.loss = int(chunks), schedule, loss
        self.axis: Axis = axis_of(mesh, "pipeline")
        interleaved = schedule in _INTERLEAVED
        self.balance, made, self._ties, self._crossings = _stages(module, balance, self.axis, interleaved, sample)
        self.partitions = torch.nn.ModuleDict({str(number): each for number, each in made.items()})  # type: ignore[assignment]
        self.device = next((each.device for each in self.partitions.parameters()), torch.device("cpu"))
        self._borrowed_by: dict[int, list[Borrowed]] = {number: [] for number in made}
        self._borrowed = [each for each in (self._side_of(tie) for tie in self._ties) if each is not None]
        for parameter in self.partitions.parameters() if self.axis.size > 1 else ():
            set_part(parameter, Part(self.axis))
        self._own = list(self.partitions.parameters())  # read now: later, who reads them waits for their values
        self._group = _own_group(self.axis) if self.axis.size > 1 else None
        self._progress = progress_of_job()
        self._failing = Failing(self.axis, self._group, self._progress) if self.axis.size > 1 else None
        self._made: dict[Any, Any] = {}  # torch's schedules, by what they are for
        self._measured = Measured(self.axis.size, len(made))

    def _side_of(self, tie: Tie) -> Borrowed | None:
        """On every rank of the job."""
        owner, borrower = (number % self.axis.size for number in (tie.owner, tie.borrower))
        mine = self.axis.rank in (owner, borrower)
        comm = current().subset(self.axis.ranks[0] if mine else None)
        if not mine:
            return None
        owns = self.axis.rank == owner
        number, name = (tie.owner, tie.name) if owns else (tie.borrower, tie.borrowed)
        found = Borrowed(comm, owns, self.stages[number], name)
        self._borrowed_by[number].append(found)
        return found

    @property
    def stage(self) -> torch.nn.Module:
        """The layers of this rank. Raises ``RuntimeError`` where it has several stages: see :attr:`stages`."""
        if len(self.stages) > 1:
            raise RuntimeError(f"this rank has the stages {', '.join(map(str, self.stages))}: take them from stages")
        (found,) = self.stages.values()
        return found

    @property
    def stages(self) -> dict[int, torch.nn.Module]:
        """The layers of this rank, by the numbers of its stages."""
        return {int(number): each for number, each in cast(torch.nn.ModuleDict, self.partitions).items()}

    @property
    def first(self) -> bool:
        """Whether this rank has the first layers, and takes the input."""
        return self.axis.rank == 0

    @property
    def last(self) -> bool:
        """Whether this rank has the last layers, and takes the target."""
        return self.axis.rank == self.axis.size - 1

    def names_in_whole(self, name: str) -> tuple[str, ...]:
        """As :meth:`.Pipe.names_in_whole`; a parameter that other stages borrow has their names, too."""
        (own,) = super().names_in_whole(name)
        number = int(name.split(".", 2)[1])
        stage = self.stages[number]
        lent = [tie.borrowed for tie in self._ties if tie.owner == number and tie.name == own]
        names = (own, *lent)
        return tuple(stage.name_in_whole(each) for each in names) if isinstance(stage, CausalStage) else names

    # - Steps

    def step(self, *inputs: Any, target: Any = None) -> torch.Tensor:
        """Forward and backward of all micro-batches; returns the loss. On every rank.

        The first stage takes `inputs`, tensors whose first dimension is the batch, and the last one `target`; others ignore
        what they are given. Loss and gradients are those of ``loss(module(*inputs), target)``, an average over the batch.
        A batch of fewer rows than `chunks` has as many micro-batches as rows.

        Raises ``ValueError`` on every rank for a batch, or a target, that cannot be cut into equal micro-batches. What a
        stage raises ends the pipeline: the other ranks raise ``RuntimeError``, with that error's text.
        """
        if self.loss is None:
            raise RuntimeError("step() computes a loss: give Pipe(…, loss=function of output and target)")
        since = time.perf_counter()
        count = self._begin(inputs, target, trains=True)
        optimizers = current().registry.having(self._own)
        if self.axis.size == 1:
            found: torch.Tensor = self._alone(inputs, target, count, optimizers)
        else:
            schedule, stages = self._schedule(count, backward=True)
            for stage in stages:
                stage.optimizers, stage.measured = optimizers, self._measured
                stage.borrowed = self._borrowed_by[stage.stage_index]
            losses: list[torch.Tensor] = []
            options = {"target": target, "losses": losses} if self.last else {}
            with self._messages() as failing:
                schedule.step(*(inputs if self.first else ()), return_outputs=False, **options)
            found = failing.settle(torch.stack([each.detach() for each in losses]).sum().cpu() if losses else None)
        for each in self._borrowed:
            each.settle()
        self._measured.step(count, time.perf_counter() - since)
        return found

    def explain(self) -> str:
        """Where the time of this rank's last steps went: computation, the bubble, and calls and messages. On any rank.

        It also says which schedule ran, and how many skip connections come with the input of each stage and go with its
        output. Raises ``RuntimeError`` before there were three steps.
        """
        told = self._measured.told(list(self.stages), self.balance)
        ran = stand_in(self.schedule, self._measured.micro_batches, self.axis.size)
        lines = [f"  {'schedule':<22} {ran}" + (f", in place of {self.schedule}" if ran != self.schedule else "")]
        for number in self.stages:
            arrive, leave = (len(self._crossings[place]) for place in (number, number + 1))
            if arrive or leave:
                lines.append(f"  {'skip connections':<22} {arrive} arrive, {leave} leave, of stage {number}")
        return "\n".join([told, *lines])

    def _alone(self, inputs: Sequence[Any], target: Any, count: int, optimizers: Sequence[Any]) -> torch.Tensor:
        """A pipeline of one stage: micro-batches in turn."""
        parts = [tuple(part) for part in cut(inputs, count)]
        total = torch.zeros(())
        for number, (part, wanted) in enumerate(zip(parts, cut(target, count), strict=True)):
            with micro_batch(number), local(optimizers if number + 1 < count else ()), self._measured.computing():
                loss = cast(Loss, self.loss)(self._alone_through(part), wanted) / count
                loss.backward()
            total = total + loss.detach().cpu()
        return total

    def _alone_through(self, part: Sequence[Any]) -> Any:
        value = part[0] if len(part) == 1 else tuple(part)
        for stage in self.stages.values():
            value = stage(value)
        return value

    def forward(self, *inputs: Any) -> Any:
        """The output, on the last stage, and None on others. In ``torch.no_grad()``, on every rank."""
        if torch.is_grad_enabled():
            raise RuntimeError("a Pipe across ranks trains by step(); call it for its output in torch.no_grad()")
        count = self._begin(inputs)
        if self.axis.size == 1:
            return put_together([self._alone_through(part) for part in cut(inputs, count)])
        schedule, stages = self._schedule(count, backward=False)
        sent: Any = None
        with self._messages() as failing:
            sent = schedule.eval(*(inputs if self.first else ()))
        failing.settle(None)
        return stages[-1].carrier.whole(sent) if self.last else None

    @contextmanager
    def _messages(self) -> Iterator[Failing]:
        """A context in which stages compute and have messages for one another; what failed there is to be settled."""
        assert self._failing is not None, "there are other ranks"
        with self._progress.step(), self._failing.guard():
            yield self._failing

    def _begin(self, inputs: Sequence[Any], target: Any = None, *, trains: bool = False) -> int:
        """The number of micro-batches; shares what all stages need. On every rank.

        Whoever has left, or comes to no further step, is missed here, in an operation that is watched.
        """
        ended = "" if self._failing is None else self._failing.why
        batch = _described(inputs, self.chunks) if self.first else None
        told: list[Any] = allgather_object(self.axis.comm, (batch, _rows(target) if self.last else None, ended))
        for _, _, why in told:
            if why:
                raise RuntimeError(f"the Pipe has ended with an error: {why}; make another one")
        batch, rows = told[0][0], told[-1][1]
        if isinstance(batch, str):
            raise ValueError(batch)
        count, shapes = batch
        if trains and self.axis.size > 1 and (not rows or rows % count):
            raise ValueError(
                f"the last stage takes a target, a tensor whose first dimension is cut into {count} equal micro-batches, "
                f"and was given {'none' if rows is None else f'one of {rows} rows'}"
            )
        if shapes != self._made.get("shapes"):  # torch's stages know the shapes of what they receive
            self._made = {"shapes": shapes}
        self._gather_once()
        for each in self._borrowed:
            each.lend()
        return cast(int, count)

    def _gather_once(self) -> None:
        """A stage of several micro-batches has its gradients whole until the last one, and so what it gathers.

        What other stages borrow is whole from one pass to the next.
        """
        if self.chunks > 1 or self._borrowed:
            for optimizer in current().registry.having(self._own):
                optimizer._engine.unsharder.gather_once()

    def _schedule(self, count: int, *, backward: bool) -> tuple[Any, list[_Stage]]:
        """torch's, for so many micro-batches, and the stages of this rank in it."""
        key = count, backward, self.training
        if key not in self._made:
            stages = [self._torch_stage(number) for number in self.stages]
            loss = partial(_share, cast(Loss, self.loss), count, stages[-1]) if backward else None
            name = stand_in(self.schedule, count, self.axis.size)
            given = stages if name in _INTERLEAVED else stages[0]
            self._made[key] = SCHEDULES[name](given, count, loss_fn=loss, scale_grads=False), stages
        return cast(tuple[Any, list[_Stage]], self._made[key])

    def _torch_stage(self, number: int) -> _Stage:
        carrier = Carrier(self.stages[number], self._crossings[number], self._crossings[number + 1])
        found = _Stage(carrier, number, len(self.balance), self.device, group=self._group)
        found.progress, found.concludes = self._progress, number == self.axis.rank
        return found


def _own_group(axis: Axis) -> Any:
    """A group of torch.distributed for one Pipe: a stage that fails closes its connections. On every rank of the job.

    All ranks make the groups of all pipelines: torch names one that its members alone make by how many others a rank
    has, which may differ among them.
    """
    pipelines = sorted(set(allgather_object(current().control, axis.ranks)))
    made = {ranks: torch.distributed.new_group(list(ranks), group_desc="pipeline") for ranks in pipelines}
    return made[axis.ranks]


def _share(loss: Loss, count: int, last: _Stage, sent: Any, target: Any) -> torch.Tensor:
    with last.progress.computing(f"the loss behind stage {last.stage_index}"):
        return loss(last.carrier.whole(sent), target) / count


def _stages(
    module: torch.nn.Module, balance: Sequence[int] | str, axis: Axis, interleaved: bool, sample: Any
) -> tuple[list[int], dict[int, torch.nn.Module], list[Tie], list[list[Key]]]:
    """The balance, this rank's stages, the ties between stages, and the skip connections at each stage's ends."""
    causal = is_causal_model(module)
    if not causal and not isinstance(module, torch.nn.Sequential):
        raise TypeError(
            "module should be an nn.Sequential, or a causal model of transformers, whose layers are stages, and is "
            f"{type(module).__name__}"
        )
    layers = list(blocks_of(module)) if causal else list(cast(torch.nn.Sequential, module))
    if isinstance(balance, str):
        balance = _measured_balance(balance, module, layers, axis, sample, 2 if interleaved else 1)
    sizes = checked_balance(balance, len(layers))
    _check_stages(sizes, axis.size, interleaved)
    ends = list(accumulate(sizes, initial=0))
    numbers = range(axis.rank, len(sizes), axis.size)
    if causal:
        tied = axis.size > 1 and _tied_head(module)
        made: dict[int, torch.nn.Module] = {
            number: CausalStage(module, ends[number], ends[number + 1]) for number in numbers
        }
        ties = [Tie(0, tied, len(sizes) - 1, "head.weight")] if tied else []
        return sizes, made, ties, [[] for _ in ends]
    verify_skippables(cast(torch.nn.Sequential, module))
    named = [(name, cast(torch.nn.Module, each)) for name, each in module._modules.items()]  # also what is there twice
    stages = [torch.nn.Sequential(OrderedDict(named[begin:end])) for begin, end in pairwise(ends)]
    ties = ties_between([_parameters(stage) for stage in stages]) if axis.size > 1 else []
    for tie in ties:
        _check_tie(tie, axis.size)
    return sizes, {number: stages[number] for number in numbers}, ties, crossings(layers, ends)


def _check_stages(sizes: Sequence[int], ranks: int, interleaved: bool) -> None:
    if interleaved and len(sizes) % ranks:
        raise ValueError(
            f"balance={list(sizes)} has {len(sizes)} stages, and the axis 'pipeline' {ranks} ranks: give each rank "
            f"equally many stages, {ranks * (len(sizes) // ranks + 1)} for instance"
        )
    if not interleaved and len(sizes) != ranks:
        raise ValueError(
            f"balance={list(sizes)} has {len(sizes)} stages, and the axis 'pipeline' {ranks} ranks: give each rank a "
            f"stage, or take schedule='interleaved1f1b', with a multiple of {ranks} stages"
        )


def _check_tie(tie: Tie, ranks: int) -> None:
    owner, borrower = tie.owner % ranks, tie.borrower % ranks
    if owner >= borrower:
        raise NotImplementedError(
            f"{tie.name!r} of stage {tie.owner} is {tie.borrowed!r} of stage {tie.borrower}, too, and these are on the "
            f"ranks {owner} and {borrower} of the pipeline: choose a balance by which the first is on an earlier rank, or "
            "untie them"
        )


def _measured_balance(
    wish: str, module: torch.nn.Module, layers: Sequence[torch.nn.Module], axis: Axis, sample: Any, each: int
) -> list[int]:
    """The balance by the seconds that layers take on the first rank, which measures for all."""
    if wish != "auto" or sample is None:
        raise ValueError(
            f"balance={wish!r}: give the number of layers of each stage, or balance='auto' with a sample=, a micro-batch "
            "of the input, on which layers are timed"
        )
    found = None
    if axis.rank == 0:
        given = sample if isinstance(sample, tuple) else (sample,)
        found = balanced(layer_seconds(module, layers, given), each * axis.size)
    return cast(list[int], broadcast_object(axis.comm, found, 0))


def _parameters(stage: torch.nn.Module) -> Mapping[str, torch.nn.Parameter]:
    return dict(stage.named_parameters())


def _tied_head(model: Any) -> str:
    """The name, in the first stage, of the embedding that is the head's weight, too; empty where it is not."""
    for name, parameter in model.base_model.named_parameters():
        if parameter is model.lm_head.weight:
            return f"base.{name}"
    return ""


def _rows(target: Any) -> int | None:
    return target.shape[0] if isinstance(target, torch.Tensor) and target.dim() else None


def _described(inputs: Sequence[Any], chunks: int) -> Any:
    """The number of micro-batches of a batch, and the shapes of its tensors; a text, where it is none (pure)."""
    if not inputs or not all(isinstance(each, torch.Tensor) and each.dim() for each in inputs):
        kinds = ", ".join(type(each).__name__ for each in inputs) or "nothing"
        return f"the first stage takes tensors whose first dimension is the batch, and was given {kinds}"
    rows = {each.shape[0] for each in inputs}
    if len(rows) > 1 or 0 in rows:
        return f"tensors of a batch have as many rows, at least 1, and these have {sorted(rows)}"
    (found,) = rows
    count = min(chunks, found)
    if found % count:
        return (
            f"a batch of {found} rows cannot be cut into {count} equal micro-batches: choose chunks that divide it, and "
            "drop the last batch of an epoch if it is shorter (drop_last=True)"
        )
    return count, tuple((tuple(each.shape), each.dtype) for each in inputs)
