"""A model whole, where ranks have shares or parts of it: its parameters on every rank, or its state dict on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any, NamedTuple

import torch

from overlap.job.session import current
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.optimizer.saving.divided import everyones, holding_of, own_of, refuse_several, written_by
from overlap.optimizer.shares import before_saving, owners_of
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object
from overlap.transport.operation import all_to_all

__all__ = ["full_state_dict", "whole"]


@contextmanager
def whole(model: torch.nn.Module) -> Iterator[None]:
    """A context in which all parameters of `model` are whole on every rank, as ``fsdp`` keeps them in shares.

    Inside, any rank may use the model as in one process, alone: evaluate it, call its methods, generate, copy it. What is
    written to parameters counts afterwards, if every rank writes the same. Under other strategies it does nothing. Each
    rank needs memory for the whole model.

    On every rank, between ``step()`` and the next forward. Raises ``RuntimeError`` inside a forward pass, and for a
    ``step()`` inside.
    """
    opened = []
    with ExitStack() as stack:
        for optimizer in current().registry.having(list(model.parameters())):
            engine = optimizer._engine
            if engine.unsharder.active:
                engine.closing.meet("whole()")
                stack.enter_context(engine.unsharder.whole())
                opened.append(engine)
        yield
    for engine in opened:
        engine.sharded.wrote()
        engine.closing.meet("the end of whole()")  # a rank that reads the model now asks the others for their shares


def full_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` of the whole model on rank 0, in the CPU's memory; nothing on other ranks. On every rank.

    Names and shapes are those of the whole model, where it is divided by `model_parallel` or `pipe`, as in a checkpoint of
    :func:`dear.save_checkpoint`, and whole with `fsdp`. Others send what they have, one tensor after the other; rank 0
    needs memory for the whole model. Tensors are copies. Call it between ``step()`` and the next forward.

    Raises ``ValueError`` on every rank where ranks have models of their own.
    """
    session = current()
    comm = session.comm
    for each in owners_of(model):
        if type(each).state_dict is not DistributedOptimizer.state_dict:
            raise ValueError(f"{each.strategy.name}'s ranks have parameters of their own: take model.state_dict()")
    before_saving(model, "full_state_dict()")
    own = own_of(model)
    holdings = everyones(session, lambda: holding_of(model, (), own))
    refuse_several(holdings)
    mine = written_by(holdings, comm.rank)
    shown = {name: each.shown for name, each in own.items() if name in mine}
    told = allgather_object(session.control, {name: _outline(value) for name, value in shown.items()})
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in holdings for name in each.shapes):
        first = next(each[name] for each in told if name in each)
        senders: dict[_Box, int] = {}
        for rank, each in enumerate(told):
            for box in each[name].boxes if name in each else ():
                senders.setdefault(box, rank)
        value = (
            first.value if first.dtype is None else _gathered(comm, first.shape, first.dtype, senders, shown.get(name))
        )
        if comm.rank == 0:
            found[name] = value
    return found


_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


class _Outline(NamedTuple):
    """What a rank has of a tensor: boxes of it. Or a `value` that is no tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    boxes: tuple[_Box, ...]
    value: Any = None


def _outline(value: Any) -> _Outline:
    if not isinstance(value, torch.Tensor):
        return _Outline((), None, (), value)
    return _Outline(tuple(value.shape), value.dtype, tuple(_pieces(value)))


def _pieces(value: torch.Tensor) -> dict[_Box, torch.Tensor]:
    """What this rank has of a tensor, as boxes."""
    from overlap.state.chunks import Chunked

    if isinstance(value, Chunked):
        return {(place.offsets, place.sizes): values for place, values in value.pieces}
    return {((0,) * value.dim(), tuple(value.shape)): value}


def _gathered(
    comm: Communicator, shape: tuple[int, ...], dtype: torch.dtype, senders: Mapping[_Box, int], mine: Any
) -> torch.Tensor:
    """On rank 0 the tensor of which ranks send boxes, those of the lowest first. `mine` is what this rank has of it.

    On every rank.
    """
    pieces = _pieces(mine) if comm.rank in senders.values() else {}
    sent = [pieces[box].detach().cpu().flatten() for box, rank in senders.items() if rank == comm.rank]
    send = torch.cat([torch.empty(0, dtype=dtype), *sent]).view(torch.uint8)
    counts = [0] * comm.size
    for (_, sizes), rank in senders.items():
        counts[rank] += prod(sizes) * dtype.itemsize if comm.rank == 0 else 0
    recv = torch.empty(sum(counts), dtype=torch.uint8)
    to = [send.numel(), *[0] * (comm.size - 1)]
    comm.run(all_to_all(send, recv, send_counts=to, recv_counts=counts, label="full_state_dict"))
    whole = torch.empty(shape if comm.rank == 0 else (0,), dtype=dtype)
    if comm.rank == 0:
        flats = recv.view(dtype).split([prod(sizes) for _, sizes in senders])
        for (offsets, sizes), flat in zip(senders, flats, strict=True):
            whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = flat.view(sizes)
    return whole
