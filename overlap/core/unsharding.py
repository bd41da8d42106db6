"""Gathers whole parameters of freed buckets ahead of their use, and frees them after it.

    forward    a module is entered: its buckets are awaited, the next ones gathered      left: they may go
    backward   a gradient comes to what a module returned: the same, in reverse          its gradients are there: it may go

What is gathered and freed when is decided by `overlap.plan.sweeps`, the same on all ranks. Whatever is read while a module
runs is noted in its frame, so that backward finds it also where another module's parameters were used.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from overlap.core.bucket import Bucket, Slot, too_many
from overlap.core.buckets.heap import give_back, keep_apart
from overlap.core.feature import Feature
from overlap.core.freed import FreedBucket
from overlap.core.participants import Participants
from overlap.plan.plan import Residency
from overlap.plan.sweeps import Act, Do, Sweeps
from overlap.transport.communicator import Communicator
from overlap.transport.objects import broadcast_object
from overlap.transport.work import Work, arrive

__all__ = ["SamePasses", "Unsharder"]

log = logging.getLogger("dear")

_SERIES = 2**56
_UNKNOWN = 2**30  # gradients in one backward pass
_AHEAD = 4  # so many buckets, of the size that is usual, may be whole beside those that are used


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


class Unsharder(Feature):
    """The freed buckets of one optimizer, gathered over `lanes`.

    `model`, where the script gave one, is what a pass begins with; beside what is used, `room` bytes of its parameters may
    be whole. `comm` is for what its ranks agree on. With `poison`, memory is NaN before it is gathered and when it is
    freed. All methods: on one rank, unless they say so.
    """

    def __init__(
        self,
        lanes: Sequence[Communicator],
        model: torch.nn.Module | None,
        comm: Communicator,
        participants: Participants,
        room: int | None,
        *,
        poison: bool,
    ) -> None:
        self._comm, self._participants = comm, participants
        self._lanes, self._model, self._room, self._poison = tuple(lanes), model, room, poison
        self.active = False  # there are freed buckets
        self.room = 0  # bytes of parameters that may be whole beside those that are used, or of gradients on their way
        self._buckets: list[FreedBucket] = []  # in the order of their use
        self._numbers: dict[Bucket, int] = {}
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
        self._expected: dict[int, Slot] = {}  # by number, whose gradients may come in several parts
        self.gathered = 0  # operations so far …
        self.series = 0  # … and a number that stands for their buckets, in this order
        self.whole_now = False  # see :meth:`open`
        self._settled = False  # the first round is over
        self.stale = False  # shards have other values than those gathered ahead, on all ranks
        self._told: Callable[[], Callable[[], None] | None] | None = None
        self._narrow: list[FreedBucket] = []  # whose parameters are of 16 bits while passes use them
        self._trains = False  # a graph is made that the next backward goes through

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The freed ones, in the order of their use."""
        return tuple(self._buckets)

    def tell(self, told: Callable[[], Callable[[], None] | None]) -> None:
        """Call what `told()` refers to before each backward pass, on every rank."""
        self._told = told

    def planned(self, order: Sequence[Bucket]) -> None:
        freed = [bucket for bucket in reversed(order) if isinstance(bucket, FreedBucket)]
        if freed == self._buckets:
            return
        if not self.whole_now:
            self._carry_out(self._sweeps.over())
        self.whole_now = False
        self._buckets, self.active = freed, bool(freed)
        self._narrow = [bucket for bucket in freed if bucket.narrow]
        self._slots = {id(slot.param): slot for bucket in freed for slot in bucket.slots}
        self._numbers = {bucket: number for number, bucket in enumerate(freed)}
        self._of_module.clear()
        self._inside.clear()
        self._unsharded.clear()
        self._hold()
        usual = median([bucket.nbytes for bucket in freed] or [0])
        self.room = _AHEAD * int(usual) if self._room is None else self._room
        self._sweeps = self._plan()

    def _hold(self) -> None:
        self._holders = {bucket: set() for bucket in self._buckets}
        self._entered.clear()
        self._learned, self._passes = False, 0
        for module in () if self._model is None else self._model.modules():
            for bucket in self._own(module):
                self._holders[bucket].add(module)
                self._entered[module] = -1.0

    def _plan(self) -> Sweeps:
        stay, keep = (
            [number for number, bucket in enumerate(self._buckets) if bucket.plan.residency is residency]
            for residency in (Residency.FREED_AFTER_BACKWARD, Residency.FREED_IN_STEP)
        )
        return Sweeps([bucket.nbytes for bucket in self._buckets], self.room, self._passed, stay, keep)

    def _passed(self, number: int) -> bool:
        """Whether all modules with parameters of the bucket come before the one that this pass has come to."""
        return self._learned and all(self._over[each] < self._now for each in self._holders[self._buckets[number]])

    def _learn(self) -> None:
        """Take over the order in which rank 0 has used modules in its first pass. On every rank, between passes."""
        modules = list(self._entered)
        numbers = {module: number for number, module in enumerate(modules)}
        mine = [(numbers[module], enters) for module, enters in self._seen]
        seen: list[tuple[int, bool]] = broadcast_object(self._comm, mine, 0)
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
        self._participants.passes("forward", trains=trains)
        self._trains = self._trains or trains
        self._latest, self._now = -1, -1.0
        self._passes += 1
        self._left.clear()
        if self.stale:
            self._carry_out(self._sweeps.replaced())
            self.stale = False
        self._carry_out(self._sweeps.forward(trains=trains))

    def _expect_more(self, module: torch.nn.Module) -> None:
        """A checkpoint that recomputes `module` by a backward inside of backward may bring its gradients in several parts.

        How many is learned: until then they wait for the call that closes the round.
        """
        for parameter in dict.values(module._parameters):
            slot = self._slots.get(id(parameter))
            if slot is not None and slot.index not in self._expected:
                self._expected[slot.index] = slot
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
        if not self._warned and self._comm.rank == 0:
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
            told = None if self._told is None else self._told()
            if told is not None:
                told()
            self._participants.passes("backward")
            self._carry_out(self._sweeps.backward())

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

    def follow(self, what: str, *, trains: bool = False) -> None:
        """Others make a forward or a backward pass, and this rank, which has joined, gives them its share."""
        if what == "forward":
            self._begin_forward(trains=trains)
            self._carry_out(self._sweeps.rest())
        else:
            self._participants.passes("backward")
            self._carry_out(self._sweeps.backward())
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

    def updated(self, passes: int) -> None:
        """Shards have other values, after so many backward passes. On every rank."""
        if self.whole_now:
            raise RuntimeError("step() inside dear.whole(model), which keeps parameters whole: leave that first")
        for slot in self._expected.values():
            if slot.expected == _UNKNOWN and slot.fires:
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
            self._learn()
        self._carry_out(self._sweeps.next_step())

    def over(self) -> None:
        """All passes of this round are over on this rank, which is about to wait for others: they may need its share."""
        if not self.whole_now:
            self._carry_out(self._sweeps.over())
            self._trains = False
            self._rest()
        if not self._settled:
            self._settled = True
            give_back()
            keep_apart(True)  # the optimizer's state, which it makes now

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
        self._carry_out(self._sweeps.replaced())
        for bucket in filter(wanted, self._buckets):
            self._gather(bucket, exact=True)
            self._land(bucket)
            yield bucket
            self._free(bucket)

    def give_back(self) -> None:
        """Make parameters whole for good. On every rank."""
        self.over()
        self.open()
        for bucket in self._buckets:
            for slot in bucket.slots:
                slot.freed = None
        self._buckets, self.active = [], False

    def open(self) -> None:
        """Make all parameters whole, until other buckets are :meth:`planned`. On every rank, between steps."""
        self._carry_out(self._sweeps.replaced())
        self.whole_now = True
        for bucket in self._buckets:
            self._gather(bucket, exact=True)
        for bucket in self._buckets:
            self._land(bucket)
            bucket.unshard(exact=True)

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
        if not self.whole_now:
            self._carry_out(self._sweeps.replaced())
            self._sweeps = self._plan()

    # - Memory and operations

    def _carry_out(self, acts: Collection[Do]) -> None:
        for act, number in acts:
            if act is Act.GATHER:
                self._gather(self._buckets[number])
            else:
                self._free(self._buckets[number])

    def _gather(self, bucket: FreedBucket, *, exact: bool = False) -> None:
        self.gathered += 1
        self.series = (self.series * 31 + bucket.index + 1) % _SERIES
        self._land(bucket)  # where it was gathered already, and is used
        bucket.before_gather(exact=exact, poison=self._poison)
        reduction, bucket.work = bucket.work, None
        bucket.collectives.gather(self._lanes[bucket.lane], bucket)
        assert bucket.work is not None
        self._flying[bucket], bucket.work = bucket.work, reduction

    def _land(self, bucket: FreedBucket) -> None:
        work = self._flying.pop(bucket, None)
        if work is not None:
            arrive(work)
            bucket.gathered()

    def _free(self, bucket: FreedBucket) -> None:
        self._land(bucket)
        self._unsharded.discard(bucket)
        bucket.reshard(poison=self._poison)
        if bucket.narrow and not (self._frames or self._backward or self._trains):
            bucket.rest()


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
