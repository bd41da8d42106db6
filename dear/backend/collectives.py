# mypy: disable-error-code="override,assignment"
"""Collectives of torch.distributed, under all names that torch calls them by, as operations of ours.

Options of a call come as torch's object or, where the group's own methods are called, as what is in it: a ReduceOp, or the
root's rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comm_core import InvalidUsage
from dear.backend import reductions
from dear.backend.memory import Finish, apart, flat, landing, landings, sources
from dear.backend.works import as_one
from overlap.transport.native import NativeCommunicator
from overlap.transport.operation import Operation, all_gather, all_reduce, all_to_all, barrier, broadcast, reduce
from overlap.transport.operation import reduce_scatter as reduce_and_scatter

__all__ = ["Collectives"]


class Collectives:
    """Of a group over `comm`."""

    comm: NativeCommunicator
    label: str
    """Of operations, in reports of stalls and in errors."""

    elsewhere: Callable[[Any], Any]
    """The group that moves some tensors, of which the first is looked at; None: this one."""
    issue: Callable[..., Any]
    """Called with an :class:`.Operation`, and the tensors that have its results once a last argument, `finish`, was called;
    gives its work. `limit` has its timeout: torch's options of the call, or a timedelta; else the group's holds.
    """

    def _each(self, call: Callable[..., Any], *arguments: Sequence[Any]) -> Any:
        return as_one([call(*each) for each in zip(*arguments, strict=True)])

    # - Reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors = _listed(tensors)
        if (other := self.elsewhere(tensors)) is not None:
            return other.allreduce(tensors, _options(dist.AllreduceOptions, opts))
        return self._each(lambda tensor: self._reduce_all(tensor, opts, timeout or opts), tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        if (other := self.elsewhere(tensors)) is not None:
            return other.allreduce_coalesced(tensors, opts)
        return self._each(lambda tensor: self._reduce_all(tensor, opts, opts), tensors)

    def _reduce_all(self, tensor: Tensor, opts: Any, limit: Any) -> Any:
        pair = reductions.pairwise(_op(opts))
        if pair is not None:
            memory, finish = landing(tensor)
            parts, operation = self._gathered(flat(tensor))
            combined = partial(reductions.combine, pair, parts, memory)
            return self.issue(operation, [tensor], limit, _both(combined, finish))
        memory, finish = landing(tensor, filled=True)
        op = _op(opts)
        source = reductions.premultiplied(op, memory)
        operation = all_reduce(source, memory, reductions.engine_op(op), label=self.label)
        return self.issue(operation, [tensor], limit, finish)

    def _gathered(self, source: Tensor) -> tuple[Tensor, Operation]:
        """A row for each rank, and what fills them."""
        rows = torch.empty(self.comm.size, source.numel(), dtype=source.dtype, device="cpu")
        return rows, all_gather(source, rows.view(-1), label=self.label)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """Into `tensors` of the root; those of other ranks stay what they are."""
        tensors = _listed(tensors)
        if (other := self.elsewhere(tensors)) is not None:
            return other.reduce(tensors, opts)
        root, reduction = (opts, op) if isinstance(opts, int) else (getattr(opts, "rootRank", 0), opts)
        return self._each(lambda tensor: self._reduce_to(tensor, root, _op(reduction), timeout or opts), tensors)

    def _reduce_to(self, tensor: Tensor, root: int, op: Any, limit: Any) -> Any:
        at_root = self.comm.rank == root
        memory, finish = landing(tensor, filled=True) if at_root else (flat(tensor), None)
        pair = reductions.pairwise(op)
        if pair is None:
            into = memory if at_root else None
            source = reductions.premultiplied(op, memory)
            operation = reduce(source, into, reductions.engine_op(op), root, label=self.label)
            return self.issue(operation, [tensor], limit, finish)
        count = memory.numel()
        rows = torch.empty(self.comm.size if at_root else 0, count, dtype=memory.dtype, device="cpu")
        operation = self._to_one(memory, rows.view(-1), [count] * self.comm.size, root)
        combined = partial(reductions.combine, pair, rows, memory) if at_root else None
        return self.issue(operation, [tensor], limit, _both(combined, finish))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Of lists: `inputs` have a tensor for each rank, which may be of different sizes."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if (other := self.elsewhere(outputs)) is not None:
            return other.reduce_scatter(outputs, inputs, _options(dist.ReduceScatterOptions, opts))
        return self._each(lambda out, parts: self._reduce_list(out, parts, opts, timeout or opts), outputs, inputs)

    def _reduce_list(self, output: Tensor, parts: Sequence[Tensor], opts: Any, limit: Any) -> Any:
        self._require_one_each("reduce_scatter", parts)
        return self._reduce_parts(output, sources(parts), [part.numel() for part in parts], opts, limit)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # torch's name
        """Of one tensor: rank r gets part r of equal parts."""
        if (other := self.elsewhere(output)) is not None:
            return other._reduce_scatter_base(output, input, opts)
        counts = self._equal_parts("reduce_scatter", "input", input, output)
        return self._reduce_parts(output, flat(input), counts, opts, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._each(lambda out, whole: self.reduce_scatter_single(out, whole, opts), outputs, inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_parts(self, output: Tensor, whole: Tensor, counts: Sequence[int], opts: Any, limit: Any) -> Any:
        memory, finish = landing(output, beside=whole)
        pair = reductions.pairwise(_op(opts))
        if pair is None:
            op = _op(opts)
            whole = reductions.premultiplied(op, whole)
            operation = reduce_and_scatter(whole, memory, reductions.engine_op(op), counts=counts, label=self.label)
            return self.issue(operation, [output], limit, finish)
        rows = torch.empty(self.comm.size, memory.numel(), dtype=memory.dtype, device="cpu")
        received = [memory.numel()] * self.comm.size
        operation = all_to_all(whole, rows.view(-1), send_counts=counts, recv_counts=received, label=self.label)
        combined = partial(reductions.combine, pair, rows, memory)
        return self.issue(operation, [output], limit, _both(combined, finish))

    # - What only moves

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors = _listed(tensors)
        if (other := self.elsewhere(tensors)) is not None:
            return other.broadcast(tensors, opts)
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        return self._each(lambda tensor: self._broadcast(tensor, root, timeout or opts), tensors)

    def _broadcast(self, tensor: Tensor, root: int, limit: Any) -> Any:
        memory, finish = landing(tensor, filled=self.comm.rank == root)
        finish = None if self.comm.rank == root else finish
        return self.issue(broadcast(memory, root, label=self.label), [tensor], limit, finish)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Into lists: with a tensor for each rank, which may be of different sizes."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if (other := self.elsewhere(inputs)) is not None:
            return other.allgather(outputs, inputs, opts)
        return self._each(lambda parts, tensor: self._gather_list(parts, tensor, timeout or opts), outputs, inputs)

    def _gather_list(self, outputs: Sequence[Tensor], tensor: Tensor, limit: Any) -> Any:
        self._require_one_each("all_gather", outputs)
        memory, finish = landings(outputs)
        counts = [output.numel() for output in outputs]
        return self.issue(self._gather(flat(tensor), memory, counts), [outputs], limit, finish)

    def _gather(self, source: Tensor, memory: Tensor, counts: Sequence[int]) -> Operation:
        own = memory[sum(counts[: self.comm.rank]) :][: source.numel()]
        return all_gather(apart(source, memory, own), memory, counts=counts, label=self.label)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # torch's name
        """Into one tensor, of equal parts."""
        if (other := self.elsewhere(input)) is not None:
            return other._allgather_base(output, input, opts)
        counts = self._equal_parts("all_gather", "output", output, input)
        memory, finish = landing(output)
        return self.issue(self._gather(flat(input), memory, counts), [output], opts, finish)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._each(lambda whole, tensor: self.all_gather_single(whole, tensor, opts), outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """`output_lists` have a list for each rank, with a tensor for each of `inputs`."""
        by_input = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self._each(lambda outputs, tensor: self.allgather([outputs], [tensor], opts), by_input, inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """To one rank, which alone has `outputs`: a list with a tensor for each rank, of different sizes or not."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if (other := self.elsewhere(inputs)) is not None:
            return other.gather(outputs, inputs, opts)
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        source = flat(inputs[0])
        if self.comm.rank != root:
            nothing = source.new_empty(0)
            return self.issue(self._to_one(source, nothing, (), root), [], timeout or opts)
        self._require_one_each("gather", outputs[0])
        memory, finish = landings(outputs[0])
        counts = [output.numel() for output in outputs[0]]
        operation = self._to_one(apart(source, memory), memory, counts, root)
        return self.issue(operation, outputs, timeout or opts, finish)

    def _to_one(self, source: Tensor, memory: Tensor, counts: Sequence[int], root: int) -> Operation:
        """`counts` elements of each rank to the root, whose `memory` has all."""
        sent = [source.numel() if rank == root else 0 for rank in range(self.comm.size)]
        received = list(counts) if self.comm.rank == root else [0] * self.comm.size
        return all_to_all(source, memory, send_counts=sent, recv_counts=received, label=self.label)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """From one rank, which alone has `inputs`: a list with a tensor for each rank, of different sizes or not."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if (other := self.elsewhere(outputs)) is not None:
            return other.scatter(outputs, inputs, opts)
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        output, ranks = outputs[0], range(self.comm.size)
        source, sent = output.new_empty(0), [0] * self.comm.size
        if self.comm.rank == root:
            self._require_one_each("scatter", inputs[0])
            source, sent = sources(inputs[0]), [part.numel() for part in inputs[0]]
        memory, finish = landing(output, beside=source)
        received = [memory.numel() if rank == root else 0 for rank in ranks]
        operation = all_to_all(source, memory, send_counts=sent, recv_counts=received, label=self.label)
        return self.issue(operation, [output], timeout or opts, finish)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Of lists: tensor r goes to rank r, or comes from it."""
        if (other := self.elsewhere(inputs)) is not None:
            return other.alltoall(outputs, inputs, opts)
        self._require_one_each("all_to_all", inputs)
        self._require_one_each("all_to_all", outputs)
        memory, finish = landings(outputs)
        counts = [part.numel() for part in inputs], [part.numel() for part in outputs]
        return self._exchange(sources(inputs), memory, *counts, outputs, timeout or opts, finish)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # torch's name
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """Of one tensor: splits are of the first dimension; none: equal parts."""
        if (other := self.elsewhere(input)) is not None:
            return other.alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)
        sent = self._split("input", input, input_split_sizes)
        received = self._split("output", output, output_split_sizes)
        source = flat(input)
        memory, finish = landing(output, beside=source)
        return self._exchange(source, memory, sent, received, [output], timeout or opts, finish)

    alltoall_base = all_to_all_single

    def _exchange(
        self,
        source: Tensor,
        memory: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        outputs: Sequence[Tensor],
        limit: Any,
        finish: Finish,
    ) -> Any:
        source = apart(source, memory)
        operation = all_to_all(source, memory, send_counts=sent, recv_counts=received, label=self.label)
        return self.issue(operation, outputs, limit, finish)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        return self.issue(barrier(label=self.label), [], timeout or opts)

    # - Arguments

    def _require_one_each(self, what: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.comm.size:
            raise InvalidUsage(f"{what}: a list has {len(tensors)} tensors for the {self.comm.size} ranks of the group")

    def _equal_parts(self, what: str, name: str, whole: Tensor, part: Tensor) -> list[int]:
        if whole.numel() != part.numel() * self.comm.size:
            raise InvalidUsage(
                f"{what}: the {name} has {whole.numel()} elements, expected {self.comm.size} times {part.numel()}"
            )
        return [part.numel()] * self.comm.size

    def _split(self, name: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """The elements of each rank's part."""
        rows, size = (tensor.size(0) if tensor.dim() else 1), self.comm.size
        splits = list(splits) if splits else [rows // size] * size
        if len(splits) != size or sum(splits) != rows or min(splits) < 0:
            raise InvalidUsage(f"all_to_all: the {name} has {rows} rows for {size} ranks, in parts of {splits}")
        row = tensor.numel() // rows if rows else 0
        return [count * row for count in splits]


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _op(options: Any) -> Any:
    """A torch ``ReduceOp``."""
    return dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def _options(kind: Any, given: Any) -> Any:
    """As the object that torch's own backends take."""
    if given is not None and hasattr(given, "reduceOp"):
        return given
    made = kind()
    made.reduceOp = _op(given)
    return made


def _both(first: Finish, second: Finish) -> Finish:
    if first is None or second is None:
        return first or second

    def finish() -> None:
        first()
        second()

    return finish
