"""Before the first step: which parameters there are, and that all ranks hold the same ones with the same values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.parameter import is_lazy

from overlap.broadcast import broadcast_tensors
from overlap.bucket import Slot
from overlap.communicator import Communicator
from overlap.objects import allgather_object
from overlap.optimizer_state import broadcast_optimizer_state

__all__ = ["SignatureMismatch", "collect_slots", "compare", "line", "synchronize_start"]


class SignatureMismatch(ValueError):
    """Model, optimizer or arguments differ between ranks."""


def collect_slots(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    known: Sequence[Slot] = (),
) -> list[Slot]:
    """One slot per distinct parameter of the optimizer, in the order of its groups; `known` ones are kept.

    Raises ``ValueError`` for duplicate names, for pairs that are none, and when names are given but not for all.
    """
    names: dict[int, str] = {}
    if model is not None:
        names = {id(param): name for name, param in model.named_parameters()}
    elif named_parameters is not None:
        pairs = list(named_parameters)
        if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
            raise ValueError("named_parameters should hold pairs (name, parameter), as model.named_parameters() does")
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"parameter name {name!r} appears twice in named_parameters; names should be unique")
            seen.add(name)
        names = {id(param): name for name, param in pairs}
    by_param = {id(slot.param): slot for slot in known}
    slots: list[Slot] = list(known)
    for group_index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) in by_param:
                continue
            given = names.get(id(param))
            if given is None and named_parameters is not None:
                raise ValueError(
                    f"parameter {position} of group {group_index}, shape {tuple(param.shape)}, has no name: "
                    f"named_parameters holds {len(names)} parameters and should hold all of the optimizer's"
                )
            _refuse_lazy(given or f"{position} of group {group_index}", param)
            slot = Slot(len(slots), given or f"group{group_index}.{position}", param, group_index)
            by_param[id(param)] = slot
            slots.append(slot)
    for name, buffer in () if model is None else model.named_buffers():
        _refuse_lazy(name, buffer)
    if not slots:
        raise ValueError("the optimizer has no parameters")
    return slots


def _signature(optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> list[str]:
    first = f"optimizer {type(optimizer).__name__} with {len(optimizer.param_groups)} parameter group(s)"
    return [first, *(f"{line(slot)}, group {slot.group}" for slot in slots)]


def line(slot: Slot) -> str:
    """What has to be the same of a parameter on all ranks; they may use several devices of a kind."""
    param = slot.param
    return f"{slot.name}: shape {tuple(param.shape)}, {param.dtype} on {param.device.type}"


def compare(what: str, signatures: Sequence[Sequence[str]]) -> None:
    """Raise where a rank's lines differ from rank 0's; `signatures` hold every rank's, in rank order (pure)."""
    reference = signatures[0]
    for rank, signature in enumerate(signatures):
        if list(signature) == list(reference):
            continue
        for index in range(max(len(reference), len(signature))):
            mine = signature[index] if index < len(signature) else "nothing more"
            expected = reference[index] if index < len(reference) else "nothing more"
            if mine != expected:
                raise SignatureMismatch(
                    f"{what} differ between ranks: entry {index} is «{expected}» on rank 0 and «{mine}» on rank {rank}"
                )


def _refuse_lazy(name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{name!r} belongs to a lazy module and has no shape yet; run one forward before wrapping")


def synchronize_start(
    comm: Communicator,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    slots: Sequence[Slot],
    *,
    state: bool = True,
) -> None:
    """Compare signatures, then take rank 0's parameters, buffers and optimizer state. On every rank of `comm`."""
    if comm.size == 1:
        return
    compare("model and optimizer", allgather_object(comm, _signature(optimizer, slots)))
    tensors: dict[int, torch.Tensor] = {id(slot.param): slot.param for slot in slots}
    if model is not None:
        tensors.update((id(value), value) for value in (*model.parameters(), *model.buffers()))
    broadcast_tensors(comm, list(tensors.values()), 0)
    if state:
        broadcast_optimizer_state(comm, optimizer, 0)
