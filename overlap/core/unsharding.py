"""Gathers whole parameters of freed buckets ahead of their use, and frees them after it.

    forward    a module is entered: its buckets are awaited, the next ones gathered      left: they may go
    backward   a gradient comes to what a module returned: the same, in reverse          its gradients are there: it may go

What is gathered and freed when is decided by `overlap.plan.sweeps`, the same on all ranks. Whatever is read while a module
runs is noted in its frame, so that backward finds it also where another module's parameters were used.

[Note: several optimizers of one model]
A rank waits for a gather when it reads or frees a bucket, and then all gathers before that one in the series of its sweeps
are issued. All optimizers of a model share one series, so of the ranks that wait for a gather, the one that is first in it
waits for nobody that waits. Before a rank waits for anything else, as for the tally of one optimizer, it goes through the
passes of all of them. With a series for each optimizer, a rank in a gather of the first one may wait for a rank in a gather
of the second one, and that one for it:

    rank 0    pass: waits for a3 ──▶ rank 1 has yet to issue it, and waits for b2 ──▶ rank 0 has yet to issue it
    rank 0    step() of a: waits for the tally ──▶ rank 1 is in its pass, and waits for b2 ──▶ rank 0 issues it for b
    rank 0    join(): frees a1, which rank 1 has yet to issue, that waits for b2 ──▶ rank 0 issues it when it has freed a1

[Note: who goes through which passes]
Ranks go through a pass that they leave out where others may make it: backward after a forward pass that trains, and both
where there usually are some. They tell ranks that have joined of these passes, too, before they wait for them. A rank that
has joined goes through those that it is told of, and guesses none: it may come to a later step without its call.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from overlap.core.bucket import Bucket, Slot, too_many
from overlap.core.buckets.freed import FreedBucket
from overlap.core.buckets.heap import give_back, keep_apart
from overlap.core.buckets.host_bucket import TURN_COLLECTIVES
from overlap.core.feature import Feature
from overlap.core.gradient_memory import GradientMemory
from overlap.core.participants import Participants
from overlap.job.memory.host_memory import HostMemory
from overlap.plan.plan import Residency
from overlap.plan.sweeps import Act, Do, Sweeps
from overlap.transport.communicator import Communicator
from overlap.transport.objects import broadcast_object
from overlap.transport.work import Work, arrive

__all__ = ["Enlisted", "SamePasses", "Unsharder"]

log = logging.getLogger("dear")

_SERIES = 2**56
_UNKNOWN = 2**30  # gradients in one backward pass
_AHEAD = 4  # so many buckets, of the size that is usual, may be whole beside those that are used
_KINDS = (  # the last arguments of `Sweeps`
    (Residency.FREED_AFTER_BACKWARD,),
    (Residency.FREED_IN_STEP, Residency.FREED_IN_STEP_ON_HOST),
    (Residency.SHARDED_POST_FORWARD,),
)


class _Frame:
    """A forward pass of `modules` that is going on: of one, or of all that are in a `compiled` one."""

    __slots__ = ("awaited", "compiled", "hidden", "modules", "used")

    def __init__(self, modules: Sequence[torch.nn.Module], *, compiled: bool) -> None:
        self.modules, self.compiled = modules, compiled
        self.hidden: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # gradients of another type than the parameters
        self.used: list[FreedBucket] = []
        self.awaited: list[FreedBucket] = []  # of modules inside, which backward cannot tell from this one

    def hide(self, buckets: Iterable[FreedBucket]) -> None:
        """Take away gradients that are of another type than parameters while passes use them: compilers refuse those."""
        for bucket in buckets:
            for slot in bucket.slots if bucket.narrow else ():
                param, gradient = slot.param, slot.param.grad
                if gradient is not None:
                    self.hidden.append((param, gradient))
                    param.grad = None

    def show(self) -> None:
        """Undo :meth:`hide`."""
        for param, gradient in self.hidden:
            param.grad = gradient


@dataclass(eq=False, slots=True)
class _Member:
    """One of the optimizers of a model."""

    participants: Participants
    comm: Communicator
    lanes: tuple[Communicator, ...]
    room: int | None
    group: Communicator | None  # among whose ranks parameters that are `SHARDED_POST_FORWARD` are gathered for backward
    lines: Communicator | None = None  # gather parameters that lie in the memory of …
    host: HostMemory | None = None  # … hosts
    told: Callable[[], Callable[[], bool] | None] | None = None
    buckets: list[FreedBucket] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)  # of buckets whose gradients are freed
    settled: bool = False  # the first round is over


class Unsharder:
    """The freed buckets of one optimizer, or of several of one model: [Note: several optimizers of one model].

    `model`, where the script gave one, is what a pass begins with. With `poison`, memory is NaN before it is gathered and
    when it is freed. An optimizer is named by its `participants`. All methods: on one rank, unless they say so.
    """

    def __init__(self, model: torch.nn.Module | None, *, poison: bool) -> None:
        self._model, self._poison = model, poison
        self._members: dict[Participants, _Member] = {}
        self._first: _Member  # tells other ranks of passes
        self._owners: dict[Bucket, _Member] = {}
        self._freeing: set[_Member] = set()  # those with buckets here
        self._pending: set[_Member] = set()  # of these: a pass was made since they were updated, perhaps on other ranks
        self._before: _Member | None = None  # the optimizer that was updated last …
        self.passed = False  # … since when this rank has begun a pass
        # By two that were updated one after the other: whether, the last time, a pass came between, on any rank.
        self._between: dict[tuple[_Member | None, _Member], bool] = {}
        self.shared = False  # several optimizers have buckets in the same passes; the same on every rank
        self._on_streams = False  # parameters are on a device
        self.active = False  # there are freed buckets
        self.room = 0  # bytes of parameters that may be whole beside those that are used, or of gradients on their way
        self._buckets: list[FreedBucket] = []  # in the order of their use
        self._numbers: dict[Bucket, int] = {}
        self._once = False  # passes share what is gathered, until a backward pass that reduces
        self._sweeps = Sweeps((), 0)
        self._flying: dict[FreedBucket, Work] = {}
        self._unsharded: set[FreedBucket] = set()
        self._frames: list[_Frame] = []
        self._latest = -1  # the number of the last bucket that this pass has used
        self._backward = False
        self._aside: list[Slot] = []  # whose gradients of before this backward may add to
        self._again = False  # this backward makes a graph, which another one may go through
        self._came: dict[Bucket, set[int]] = {}  # slots whose gradients this backward has brought
        self._of_module: dict[torch.nn.Module, tuple[FreedBucket, ...]] = {}
        self._inside: dict[torch.nn.Module, tuple[torch.nn.Module, ...]] = {}  # of a compiled one
        self._in_compiled = 0  # forward passes of compiled modules that are going on
        self._warned = False
        self._holders: dict[Bucket, set[torch.nn.Module]] = {}  # the modules that have its parameters
        self._left: Counter[torch.nn.Module] = Counter()  # how often their forward is over in this pass
        self._learned = False  # from a pass of rank 0's: the order in which modules are used, and how often each is
        self._seen: list[tuple[torch.nn.Module, bool]] = []  # which were entered, and left, in the first pass
        self._passes = 0
        self._entered: dict[torch.nn.Module, float] = {}  # when it is first entered, in that order …
        self._over: dict[torch.nn.Module, float] = {}  # … and left for the last time
        self._uses: dict[torch.nn.Module, int] = {}
        self._now = -1.0  # when, in that order, the module was entered that this pass has come to
        self._slots: dict[int, Slot] = {}  # by the parameter's id
        self._expected: dict[int, Slot] = {}  # by the parameter's id, whose gradients may come in several parts
        self._waited = 0.0  # seconds so far, for gathers
        self.gathered = 0  # operations so far …
        self.series = 0  # … and a number that stands for their buckets, in this order
        self.whole_now = False  # see :meth:`open`
        self.stale = False  # shards have other values than those gathered ahead, on all ranks
        self.gradient_memory = GradientMemory(
            lambda: self.room, lambda: sum(sum(member.nbytes) for member in self._members.values())
        )
        self._narrow: list[FreedBucket] = []  # whose parameters are of 16 bits while passes use them
        self._trains = False  # a graph is made that the next backward goes through

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The freed ones, in the order of their use."""
        return tuple(self._buckets)

    @property
    def waited(self) -> float:
        """The seconds that this rank has waited so far: for gathers, and for memory of gradients."""
        return self._waited + self.gradient_memory.waited

    @property
    def lane(self) -> Communicator:
        """A communicator of those ranks that each have a share of a bucket."""
        return self._first.lanes[0]

    @property
    def host(self) -> HostMemory | None:
        """The memory of this rank's host, where some buckets may lie once for all of its ranks."""
        return self._first.host

    @property
    def borrowed(self) -> int:
        """Bytes that Linux counts of this process, and that are other ranks' parts of what lies once on this host."""
        ranks = 1 if self.host is None else self.host.comm.size
        return sum(bucket.nbytes - bucket.nbytes // ranks for bucket in self._buckets if bucket.on_host)

    def enlist(
        self,
        participants: Participants,
        comm: Communicator,
        lanes: Sequence[Communicator],
        room: int | None,
        group: Communicator | None = None,
        lines: Communicator | None = None,
        host: HostMemory | None = None,
    ) -> None:
        """Take in an optimizer of the model, with buckets that are gathered over `lanes`; `comm` is for agreements.

        `group` connects this rank with those among which parameters are sharded from forward to backward; over `lines` are
        gathered those in the memory of this rank's `host`.

        Beside what is used, `room` bytes of parameters may be whole; of several optimizers, the most that one gives. On
        every rank, between steps.
        """
        self._members[participants] = _Member(participants, comm, tuple(lanes), room, group, lines, host)
        self._on_streams = lanes[0].streams is not None
        self.gradient_memory.streams_wait = not lanes[0].host_waits
        self._first = next(iter(self._members.values()))
        self.shared = len(self._members) > 1

    def tell(self, participants: Participants, told: Callable[[], Callable[[], bool] | None]) -> None:
        """Call what `told()` refers to before each backward pass, on every rank: it says whether that is to be reduced."""
        self._members[participants].told = told

    def planned(self, participants: Participants, order: Sequence[Bucket]) -> None:
        """These are the buckets of an optimizer from now on. On every rank, between passes."""
        member = self._members[participants]
        freed = [bucket for bucket in reversed(order) if isinstance(bucket, FreedBucket)]
        member.nbytes = [bucket.nbytes for bucket in order if bucket.frees_gradients]
        everyones = [nbytes for each in self._members.values() for nbytes in each.nbytes]
        given = [each.room for each in self._members.values() if each.room is not None]
        self.room = max(given, default=_AHEAD * int(median(everyones or [0])))
        if freed == member.buckets:
            return
        if self.whole_now:
            for bucket in set(self._buckets).difference(member.buckets):
                self._free(bucket)
        else:
            self._carry_out(self._sweeps.over())
        self.whole_now = False
        member.buckets = freed
        self._arrange()

    def _arrange(self) -> None:
        """Put the buckets of all optimizers in one order: that of the model, as long as that of their use is not known."""
        self._freeing = {member for member in self._members.values() if member.buckets}
        self._pending &= self._freeing
        self._owners = {bucket: member for member in self._freeing for bucket in member.buckets}
        freed = [bucket for member in self._members.values() for bucket in member.buckets]
        if len(self._freeing) > 1 and self._model is not None:
            places = {id(parameter): place for place, parameter in enumerate(self._model.parameters())}
            last = len(places)
            freed.sort(key=lambda bucket: min(places.get(id(slot.param), last) for slot in bucket.slots))
        self._buckets, self.active = freed, bool(freed)
        self._narrow = [bucket for bucket in freed if bucket.narrow]
        self._slots = {id(slot.param): slot for bucket in freed for slot in bucket.slots}
        self._numbers = {bucket: number for number, bucket in enumerate(freed)}
        self._of_module.clear()
        self._inside.clear()
        self._unsharded.clear()
        self._lay_out()
        self._hold()
        self._sweeps = self._plan()

    def _lay_out(self) -> None:
        """Move what passes use to the host's memory, or from there, as plans say. On every rank, while nothing is used."""
        for bucket in self._buckets:
            on_host = bucket.plan.residency is Residency.FREED_IN_STEP_ON_HOST
            if on_host is not bucket.on_host:
                bucket.lie_on(self._owners[bucket].host if on_host else None)

    def _hold(self) -> None:
        self._holders = {bucket: set() for bucket in self._buckets}
        self._entered.clear()
        self._learned, self._passes = False, 0
        for module in () if self._model is None else self._model.modules():
            for bucket in self._own(module):
                self._holders[bucket].add(module)
                self._entered[module] = -1.0

    def _plan(self) -> Sweeps:
        stay, keep, in_group = (
            [number for number, bucket in enumerate(self._buckets) if bucket.plan.residency in residencies]
            for residencies in _KINDS
        )
        once = range(len(self._buckets)) if self._once else ()
        nbytes = [bucket.nbytes for bucket in self._buckets]
        return Sweeps(nbytes, self.room, self._passed, stay, keep, in_group, once, self._in_backward())

    def _in_backward(self) -> list[int]:
        """The numbers of buckets in the order in which backward comes to them: first what forward has left last.

        One that is used twice, at both ends of the model, would have backward gather all others before it.
        """
        order = list(range(len(self._buckets)))[::-1]
        if self._learned:
            left = {each: at if at < math.inf else self._entered[each] for each, at in self._over.items()}
            last = [max((left[each] for each in self._holders[bucket]), default=-1.0) for bucket in self._buckets]
            order.sort(key=lambda number: -last[number])
        return order

    def _passed(self, number: int) -> bool:
        """Whether all modules with parameters of the bucket come before the one that this pass has come to."""
        return self._learned and all(self._over[each] < self._now for each in self._holders[self._buckets[number]])

    def _learn(self, comm: Communicator) -> None:
        """Take over the order in which rank 0 has used modules in its first pass. On every rank, between passes.

        Over the `comm` of the optimizer that steps: on those of others, gradients of this round may be on their way.
        """
        modules = list(self._entered)
        numbers = {module: number for number, module in enumerate(modules)}
        mine = [(numbers[module], enters) for module, enters in self._seen]
        seen: list[tuple[int, bool]] = broadcast_object(comm, mine, 0)
        self._seen.clear()
        if not seen:
            self._passes = 0
            return
        self._learned = True
        moments = [(float(at), modules[number], enters) for at, (number, enters) in enumerate(seen)]
        self._uses = dict(Counter(module for _, module, enters in moments if enters))
        first = {module: at for at, module, enters in reversed(moments) if enters}
        at = -1.0
        for module in modules:  # what rank 0 has left out comes behind its neighbour, and may be used at any time
            at = self._entered[module] = first.get(module, at)
        self._over = dict.fromkeys(modules, math.inf) | {module: at for at, module, enters in moments if not enters}
        entered = self._entered
        self._buckets.sort(key=lambda bucket: min((entered[each] for each in self._holders[bucket]), default=math.inf))
        self._numbers = {bucket: number for number, bucket in enumerate(self._buckets)}
        self._sweeps = self._plan()

    # - A module's forward

    def enter(self, module: torch.nn.Module, *, compiled: bool = False) -> None:
        """The forward pass of `module` begins; it may read its own parameters, and a `compiled` one all that are inside."""
        if self.whole_now:
            return
        parts = self._parts(module) if compiled else (module,)
        mine = self._own_of(parts) if compiled else self._own(module)
        if torch._C._current_graph_task_id() >= 0:
            self._begin_backward()
        elif not self._frames and (module is self._model or self._goes_back(module)):
            self.passed = True
            self._begin_forward(trains=torch.is_grad_enabled())
        inside = self._in_compiled
        frame = _Frame(() if inside else parts, compiled=compiled)
        self._frames.append(frame)
        self._in_compiled += compiled
        first, last = math.inf, -1.0
        for part in frame.modules:  # in every pass of every module: without a call
            at = self._entered.get(part)
            if at is not None:
                first, last = min(first, at), max(last, at)
                if self._passes == 1 and not self._learned:
                    self._seen.append((part, True))
        if last >= 0:
            self._now = max(self._now, first)
        for bucket in mine:
            self._use(bucket, frame)
        if compiled:
            self._now = max(self._now, last)
            frame.hide(mine)
        if compiled and len(mine) == len(self._buckets) > 1:
            self._warn_of_whole(module)
        if not torch.is_grad_enabled() and len(self._frames) > 1:
            for part in parts:
                self._expect_more(part)

    def _begin_forward(self, *, trains: bool) -> None:
        if self.stale:
            self._forget_stale()
        if self._sweeps.owes_backward:
            self._first.participants.passes("backward")
        self._first.participants.passes("forward", trains=trains)
        self._pending |= self._freeing
        self._trains = self._trains or trains
        self._latest, self._now = -1, -1.0
        self._passes += 1
        self._left.clear()
        self._carry_out(self._sweeps.forward(trains=trains))

    def _forget_stale(self) -> None:
        if self.stale:
            self._carry_out(self._sweeps.replaced())
            self.stale = False

    def _expect_more(self, module: torch.nn.Module) -> None:
        """A checkpoint that recomputes `module` by a backward inside of backward may bring its gradients in several parts.

        How many is learned: until then they wait for the call that closes the round.
        """
        for parameter in dict.values(module._parameters):
            slot = self._slots.get(id(parameter))
            if slot is not None and id(parameter) not in self._expected:
                self._expected[id(parameter)] = slot
                slot.expected = _UNKNOWN

    def touch(self, bucket: Bucket) -> None:
        """A parameter of `bucket` is handed out. Between passes its reader sees NaN, and nobody waits."""
        if self.whole_now:
            return
        if torch._C._current_graph_task_id() >= 0:
            self._begin_backward()
        elif not self._frames:
            return
        assert isinstance(bucket, FreedBucket)
        self._use(bucket, self._frames[-1] if self._frames else None)

    def read(self, module: torch.nn.Module) -> None:
        """Compiled code, whose guards run, is going to read the parameters of `module`."""
        if self.whole_now:
            return
        for bucket in self._own(module):
            if any(bucket in frame.used for frame in self._frames):
                continue
            if not self._in_compiled:
                raise RuntimeError(
                    f"compiled code reads parameters of {type(module).__name__} when it begins, and fsdp has them away "
                    "then: compile modules, not functions that call them: block.compile(), or torch.compile(block)"
                )
            self._use(bucket, self._frames[-1])

    def leave(self, output: Any) -> None:
        """The forward pass that was entered last is over."""
        if not self._frames:
            return
        frame = self._frames.pop()
        self._in_compiled -= frame.compiled
        if frame.hidden:
            frame.show()
        if torch._C._current_graph_task_id() >= 0:
            return  # recomputed: it stays until its gradients come
        awaited = (*reversed(frame.used), *frame.awaited)
        if awaited and torch.is_grad_enabled():
            nodes = {tensor.grad_fn: None for tensor in tree_leaves(output) if _has_node(tensor)}
            for node in nodes:
                node.register_prehook(partial(self._await, awaited, frame.modules))
            if not nodes and self._frames:
                self._frames[-1].awaited += awaited
        for module in reversed(frame.modules):
            if module in self._entered:
                self._left[module] += 1
                if self._passes == 1 and not self._learned:
                    self._seen.append((module, False))
        for bucket in frame.used:
            if any(bucket in each.used for each in self._frames):
                continue
            if all(self._left[each] >= self._uses.get(each, 1) for each in self._holders[bucket]):
                self._carry_out(self._sweeps.done(self._numbers[bucket]))
            else:
                self._sweeps.rests(self._numbers[bucket])
        if not (self._frames or self._trains):
            self._rest()

    def _rest(self) -> None:
        for bucket in self._narrow:
            if not any(bucket in frame.used for frame in self._frames):
                self._unsharded.discard(bucket)  # what is gathered still is used again so
                bucket.rest()

    def _own(self, module: torch.nn.Module) -> tuple[FreedBucket, ...]:
        found = self._of_module.get(module)
        if found is None:
            slots = [self._slots.get(id(parameter)) for parameter in dict.values(module._parameters)]
            buckets = [slot.bucket for slot in slots if slot is not None and isinstance(slot.bucket, FreedBucket)]
            found = self._of_module[module] = tuple(dict.fromkeys(buckets))
        return found

    def _parts(self, module: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
        """The modules with buckets in `module`, which is compiled."""
        found = self._inside.get(module)
        if found is None:
            found = self._inside[module] = tuple(each for each in module.modules() if self._own(each))
        return found

    def _own_of(self, modules: Iterable[torch.nn.Module]) -> list[FreedBucket]:
        """The buckets of `modules`, in the order in which they are gathered for a forward pass."""
        found = dict.fromkeys(bucket for module in modules for bucket in self._own(module))
        return sorted(found, key=self._numbers.__getitem__)

    def _warn_of_whole(self, module: torch.nn.Module) -> None:
        if not self._warned and self._first.comm.rank == 0:
            log.warning(
                "%s was compiled as a whole, so all parameters of the model (%.1f MB) are whole on every rank in its "
                "forward pass, and in its backward pass: compile it block by block (for block in model.blocks: "
                "block.compile()), and those of one block are",
                type(module).__name__,
                sum(bucket.nbytes for bucket in self._buckets) / 2**20,
            )
        self._warned = True

    def _goes_back(self, module: torch.nn.Module) -> bool:
        """Whether `module`, which the script calls itself, comes before what this pass has used: another one begins.

        So does the first one after a backward pass, or after a step.
        """
        if self._latest < 0:
            return True
        numbers = [self._numbers[bucket] for each in module.modules() for bucket in self._own(each)]
        return min(numbers, default=self._latest + 1) <= self._latest

    def hand_out(self, parameter: torch.Tensor) -> None:
        """Make `parameter`, of a bucket that is gathered once, whole until the next pass has used it, as passes have it.

        On every rank, between passes.
        """
        slot = self._slots.get(id(parameter))
        if slot is None or self.whole_now:
            return
        self._forget_stale()
        bucket = slot.bucket
        assert isinstance(bucket, FreedBucket)
        self._use(bucket, None)
        self._sweeps.rests(self._numbers[bucket])
        self._latest = -1

    def added_to(self, parameter: torch.Tensor) -> None:
        """Inside ``no_sync()``, a backward pass of the script's is about to add to the gradient of `parameter` alone."""
        slot = self._slots.get(id(parameter))
        if slot is not None:
            self._tell()  # what is to be reduced of passes before this one is
            slot.put_aside()

    def _use(self, bucket: FreedBucket, frame: _Frame | None) -> None:
        if frame is not None and bucket in frame.used:
            return
        number = self._numbers[bucket]
        self._latest = max(self._latest, number)
        self._carry_out(self._sweeps.use(number))
        if bucket not in self._unsharded or bucket in self._flying:
            self._land(bucket)
            bucket.unshard()
            self._unsharded.add(bucket)
        elif self._on_streams:
            bucket.read_here()
        if frame is not None:
            frame.used.append(bucket)

    # - Backward

    def _await(self, buckets: Iterable[FreedBucket], modules: Iterable[torch.nn.Module], _gradients: Any) -> None:
        """Backward has come to what the forward pass of `modules` returned, and may read what that has read."""
        if self.whole_now:
            return
        self._begin_backward()
        self._again = self._again or torch.is_grad_enabled()  # ``create_graph=True``
        for module in modules:
            for parameter in dict.values(module._parameters):
                slot = self._slots.get(id(parameter))
                if slot is not None and slot.filled:
                    raise too_many(slot)
        for bucket in buckets:
            self._use(bucket, None)
            self._aside += [slot for slot in bucket.slots if slot.put_aside()]

    def _begin_backward(self) -> None:
        if not self._backward:
            self._backward, self._again = True, False
            self._came.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._carry_out(self._sweeps.rest())  # which others may need before they come here
            last = self._tell()
            self._first.participants.passes("backward", last=last)
            self._carry_out(self._sweeps.backward(last=last))

    def _tell(self) -> bool:
        """Tell all optimizers that a backward pass begins; returns whether it is to be reduced for all of them."""
        last = True
        for member in tuple(self._members.values()):
            told = None if member.told is None else member.told()
            if told is not None:
                last = told() and last
        return last

    def _end_backward(self) -> None:
        self._backward, self._latest = False, -1
        for slot in self._aside:
            slot.put_back()
        self._aside.clear()
        if not self._again:  # else another backward is going to read what this one has read
            for bucket in self._unsharded.difference(*(frame.used for frame in self._frames)):
                self._carry_out(self._sweeps.done(self._numbers[bucket]))  # some of its gradients have not come
        self._carry_out(self._sweeps.backward_over())
        if not self._again:
            self._trains = False
            self._rest()

    def follow(self, what: str, *, trains: bool = False, last: bool = False) -> None:
        """Others make a forward or a backward pass, which this rank leaves out, and it gives them its share."""
        if what == "forward":
            self._begin_forward(trains=trains)
            self._carry_out(self._sweeps.rest())
        else:
            self._first.participants.passes("backward", last=last)
            self._carry_out(self._sweeps.backward(last=last))
            self._carry_out(self._sweeps.backward_over())

    def came(self, slot: Slot) -> None:
        """A gradient of a freed bucket is there, so this backward reads that parameter no more."""
        bucket = slot.bucket
        assert bucket is not None
        if self.whole_now or not self._backward:
            return
        came = self._came.setdefault(bucket, set())
        came.add(slot.index)
        if len(came) == len(bucket.slots) and not self._again:
            del self._came[bucket]
            self._carry_out(self._sweeps.done(self._numbers[bucket]))

    # - Steps

    def updated(self, participants: Participants, passes: int) -> None:
        """Shards of an optimizer have other values, after so many backward passes. On every rank.

        The next forward is gathered ahead when no other optimizer is about to update what the same passes have used.
        """
        if self.whole_now:
            raise RuntimeError("step() inside dear.whole(model), which keeps parameters whole: leave that first")
        member = self._members[participants]
        for slot in self._expected.values():
            if slot.expected == _UNKNOWN and slot.fires and slot.bucket in member.buckets:
                slot.expected = max(1, slot.fires // passes)
        keep_apart(False)
        self._frames.clear()
        self._in_compiled = 0
        self._backward = False
        self._latest = -1
        self._carry_out(self._sweeps.over())
        self._trains = False
        self._rest()
        if not self._learned and self._model is not None:
            self._learn(member.comm)
        self._pending.discard(member)
        self._before, self.passed = member, False
        self._carry_out(self._sweeps.next_step(ahead=not self._pending))

    def over(self, participants: Participants) -> None:
        """All passes of an optimizer's round are over on this rank, which is about to wait for others: they may need its
        share, of all optimizers of the model.
        """
        member = self._members[participants]
        if not self.whole_now:
            if not self._sweeps.begun and self._may_have_missed(member):
                self.follow("forward", trains=True)
            if self._sweeps.owes_backward:
                self._first.participants.passes("backward")
            self._carry_out(self._sweeps.over())
            self._trains = False
            self._rest()
        if not member.settled:
            member.settled = True
            give_back()
            keep_apart(True)  # the optimizer's state, which it makes now

    def _may_have_missed(self, member: _Member) -> bool:
        """Whether others may have made a pass before this step: the first one since the optimizer's last step, or one as
        there was the last time in this place.
        """
        usual = self._between.get((self._before, member), False)
        return member in self._freeing and (member not in self._pending or usual)

    def heard(self, participants: Participants, passed: bool) -> None:
        """Some rank has `passed` through the model before this step of an optimizer, and after the last step of any.

        On every rank. So the next time, one that has made no pass there goes through one; where no rank makes it, all do.
        """
        self._between[self._before, self._members[participants]] = passed

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which all parameters are whole, on every rank; what is written to this rank's share counts.

        On every rank, between steps. Raises ``RuntimeError`` inside a module's forward.
        """
        if self.whole_now:
            yield
            return
        if self._frames:
            raise RuntimeError(
                "dear.whole(model) inside a forward pass, which has what it uses: call it between passes"
            )
        self.open()
        try:
            yield
        finally:
            self.whole_now, self._sweeps = False, self._plan()
            for bucket in self._buckets:
                for slot in bucket.slots:
                    if slot.freed is not None and slot.param.data_ptr() != slot.freed.whole.data_ptr():
                        slot.freed.whole.copy_(slot.param.data)  # ``p.data = …``
                bucket.parameters.shard.copy_(bucket.parameters.whole[bucket.own])
                self._free(bucket)

    def one_by_one(self, wanted: Callable[[Bucket], bool]) -> Iterator[Bucket]:
        """The `wanted` buckets, each with whole and exact parameters until the next one is asked for.

        None inside :meth:`whole`. On every rank with the same ones, between steps.
        """
        if self.whole_now:
            return
        self._replaced()
        for bucket in filter(wanted, self._buckets):
            self._gather(bucket, exact=True)
            self._land(bucket)
            yield bucket
            self._free(bucket)

    def give_back(self, participants: Participants) -> None:
        """Make an optimizer's parameters whole for good. On every rank."""
        self.over(participants)
        self._replaced()
        member = self._members.pop(participants)
        self._first = next(iter(self._members.values()), member)
        self.shared = len(self._members) > 1
        self._open(member.buckets)
        for bucket in member.buckets:
            for slot in bucket.slots:
                slot.freed = None
        self.whole_now = self.whole_now or not self._members
        self._arrange()

    def open(self) -> None:
        """Make all parameters whole, until other buckets are :meth:`planned`. On every rank, between steps."""
        self._replaced()
        self.whole_now = True
        self._open(self._buckets)

    def _open(self, buckets: Sequence[FreedBucket]) -> None:
        for bucket in buckets:
            self._gather(bucket, exact=True)
        for bucket in buckets:
            self._land(bucket)
            bucket.unshard(exact=True)

    def _replaced(self) -> None:
        self._carry_out(self._sweeps.replaced())
        self._pending.clear()

    def reside(self, residency: Residency, wanted: Callable[[torch.Tensor], bool]) -> None:
        """From now on, buckets whose parameters are all `wanted` are freed as `residency` says.

        On every rank, between passes.
        """
        found = [bucket for bucket in self._buckets if all(wanted(slot.param) for slot in bucket.slots)]
        self.arrange(dict.fromkeys(found, residency))

    def arrange(self, residencies: Mapping[Bucket, Residency]) -> None:
        """From now on, these buckets are freed as `residencies` says. On every rank, between passes."""
        for bucket, residency in residencies.items():
            bucket.plan = replace(bucket.plan, residency=residency)
        self._plan_anew()

    def gather_once(self) -> None:
        """From now on, what is gathered stays whole for all passes, until a backward pass that is reduced has used it.

        For steps of several passes, whose gradients lie whole on each rank meanwhile. On every rank, between steps.
        """
        if not self._once:
            self._once = True
            self._plan_anew()

    @property
    def gathers_once(self) -> bool:
        """Whether :meth:`gather_once` was called."""
        return self._once

    def _plan_anew(self) -> None:
        if not self.whole_now:
            self._replaced()
            self._sweeps = self._plan()
        self._lay_out()

    def values_change(self) -> None:
        """A script is about to write to shards: what was gathered ahead is gathered anew. On every rank."""
        self.stale = self.active
        for bucket in self._buckets:
            bucket.await_copies()

    # - Memory and operations

    def _carry_out(self, acts: Collection[Do]) -> None:
        for act, number in acts:
            bucket = self._buckets[number]
            if act is Act.GATHER:
                self._gather(bucket)
            elif act is Act.GATHER_IN_GROUP:
                self._gather_in_group(bucket)
            else:
                self._free(bucket, in_group=act is Act.RESHARD_IN_GROUP)

    def _gather(self, bucket: FreedBucket, *, exact: bool = False) -> None:
        self.gathered += 1
        self.series = (self.series * 31 + bucket.index + 1) % _SERIES
        self._land(bucket)  # where it was gathered already, and is used
        bucket.before_gather(exact=exact, poison=self._poison)
        reduction, bucket.work = bucket.work, None
        owner, collectives = self._owners[bucket], bucket.collectives
        lane = owner.lanes[bucket.lane]
        if owner.lines is not None and bucket.on_host and not exact:
            lane, collectives = owner.lines, TURN_COLLECTIVES
        if bucket.parameters.offloaded and lane.streams is not None:
            with lane.streams.aside():
                bucket.bring()
                collectives.gather(lane, bucket)
        else:
            collectives.gather(lane, bucket)
        assert bucket.work is not None
        self._flying[bucket], bucket.work = bucket.work, reduction

    def _gather_in_group(self, bucket: FreedBucket) -> None:
        group = self._owners[bucket].group
        assert group is not None, "a plan with such buckets comes with a group"
        self.gathered += 1
        self.series = (self.series * 31 - bucket.index - 1) % _SERIES
        self._land(bucket)
        self._flying[bucket] = bucket.gather_in_group(group, poison=self._poison)

    def _land(self, bucket: FreedBucket) -> None:
        work = self._flying.pop(bucket, None)
        if work is not None:
            since = time.perf_counter()
            arrive(work)
            self._waited += time.perf_counter() - since
            bucket.gathered()

    def _free(self, bucket: FreedBucket, *, in_group: bool = False) -> None:
        self._land(bucket)
        self._unsharded.discard(bucket)
        bucket.reshard(poison=self._poison, group=self._owners[bucket].group if in_group else None)
        if bucket.narrow and not (self._frames or self._backward or self._trains):
            bucket.rest()


class Enlisted(Feature):
    """Tells `unsharder` which buckets an optimizer has."""

    def __init__(self, unsharder: Unsharder, participants: Participants) -> None:
        self._unsharder, self._participants = unsharder, participants

    def planned(self, order: Sequence[Bucket]) -> None:
        self._unsharder.planned(self._participants, order)


class SamePasses(Feature):
    """Raises on all ranks, in ``step()`` before anything is updated, where their `unsharder` has not gathered the same."""

    def __init__(self, unsharder: Unsharder) -> None:
        self._unsharder = unsharder

    def digest(self) -> int:
        return self._unsharder.series

    def told(self) -> tuple[int, int]:
        return self._unsharder.gathered, self._unsharder.series

    def difference(self, told: Mapping[int, Any]) -> str:
        if len(set(told.values())) < 2:
            return ""
        counts = ", ".join(f"rank {rank} {count}" for rank, (count, _) in told.items())
        return (
            f"ranks have not made the same passes through the model since its last step, and may have used other ranks' "
            f"buckets for their own (buckets gathered so far: {counts}). Make as many passes on every rank; evaluate on "
            "one rank alone inside `with dear.whole(model):`, on every rank"
        )


def _has_node(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None
