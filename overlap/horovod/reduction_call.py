"""A caller's arguments to a reduction by name, of whichever kind, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from comm_core import ReduceOp
from overlap.horovod.controller.enqueue import ask, telling_others
from overlap.horovod.controller.operation import Group, Only, Operation
from overlap.horovod.controller.pending import Pending
from overlap.horovod.controller.request import Kind, Request
from overlap.horovod.reducing import Allreduce, ReduceScatter
from overlap.horovod.reduction import resolve
from overlap.horovod.tensors import check_reducible, spec_of, tensors_of
from overlap.job.process_set import ProcessSet
from overlap.transport.compression import Compressor

__all__ = ["ReductionCall"]


class ReductionCall(NamedTuple):
    """The arguments that all forms of an allreduce share, and all forms of a reducescatter."""

    kind: Kind
    name: str
    op: Any
    average: bool | None
    prescale: float
    postscale: float
    process_set: ProcessSet

    def start(self, tensors: Iterable[torch.Tensor], *, in_place: bool = False, single: bool = False) -> Pending:
        """Ask for it. `in_place` is for allreduces; a `single` tensor's result is not a list."""

        def prepare(name: str, group: Group) -> tuple[Request, Operation]:
            op, what = resolve(self.op, self.average), self.kind.value
            members = tensors_of(what, tensors)
            for tensor in members:
                check_reducible(what, tensor, op, self.prescale, self.postscale)
                if self.kind is Kind.REDUCESCATTER and not tensor.dim():
                    raise ValueError("reducescatter divides a tensor along its first dimension and was given a scalar")
            specs = tuple(spec_of(tensor) for tensor in members)
            factors = float(self.prescale), float(self.postscale)
            operation: Operation
            if self.kind is Kind.ALLREDUCE:
                operation = Allreduce(members, op, *factors, in_place=in_place)
            else:
                operation = ReduceScatter(members, op, *factors)
            request = Request(self.kind, name, group.number, specs, op.name, *factors)
            return request, Only(operation) if single else operation

        return ask(self.kind, self.name, self.process_set, prepare)

    def compress(
        self, compression: type[Compressor], tensors: Iterable[torch.Tensor]
    ) -> list[tuple[torch.Tensor, Any]]:
        """Each tensor as it travels, and what `compression` needs to undo that."""
        with telling_others(self.kind, self.name, self.process_set):
            if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
                raise TypeError(
                    f"compression should be one of hvd.Compression, or a Compressor, and is {compression!r}"
                )
            return [compression.compress(tensor) for tensor in tensors]

    def differentiable_op(self) -> ReduceOp:
        """The reduction, if it has a gradient; raises ``NotImplementedError`` otherwise."""
        op = resolve(self.op, self.average)
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise NotImplementedError(
                f"{self.kind.value} {self.name!r}: the gradient of {op.name} is not defined; Sum and Average have one"
            )
        return op
