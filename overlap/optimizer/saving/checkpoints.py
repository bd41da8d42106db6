"""Sharded checkpoints: each rank writes what it holds, and reads what it needs, by ``torch.distributed.checkpoint``.

On disk they are plain checkpoints of whole tensors, under the names of ``get_state_dict()``, whatever wrote them.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from overlap.job.session import current
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.optimizer.once_per_host import share_again
from overlap.optimizer.saving.background import among, background_of, told_by_all
from overlap.optimizer.saving.divided import (
    Own,
    everyones,
    holding_of,
    is_divided,
    names_of,
    own_of,
    refuse_several,
    written_by,
)
from overlap.optimizer.shares import before_loading, before_saving, owners_of, plain
from overlap.state.saved import Entry, by_parameter, first_few, groups_for, merged_groups, nest
from overlap.transport.memory import view_like

if TYPE_CHECKING:
    from overlap.state.sharded_state import ShardedState

__all__ = ["load_checkpoint", "save_checkpoint", "sharded_state_dict"]

_OURS = ("model", "optim", "master")
_SEAL = "dear::extra"
_Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def sharded_state_dict(model: torch.nn.Module, optimizer: _Optimizers = None) -> dict[str, Any]:
    """What this rank holds of `model` and `optimizer`, for ``torch.distributed.checkpoint``'s ``save`` and ``async_save``.

    Named as by ``torch.distributed.checkpoint.state_dict.get_state_dict``: ``["model"]``, and ``["optim"]`` with "state"
    and "param_groups" by the names of parameters. A tensor of which this rank has a share has the shape of the whole, and
    can be written alone; nothing is gathered. With a `gather_dtype`, ``["master"]`` has exact parameters by name;
    with `fsdp` the model itself has them.

    Of a model that is divided by `model_parallel` or `pipe`, names and shapes are those of the whole model, and what other
    ranks have, too, is left out but on those that are to write it: ranks tell each other what they have, and groups.

    Tensors are those that training goes on with. Sends nothing else; on every rank, between ``step()`` and the next
    backward. To load, take :func:`load_checkpoint`. Raises ``ValueError`` as :func:`save_checkpoint`.
    """
    shells = _shells(model, optimizer)
    own = own_of(model)
    saved: dict[str, Any] = {"model": {name: each.shown for name, each in own.items()}}
    for each in shells:
        each._engine.policy.refuse("sharded_state_dict()")
        each._engine.policy.arrive()
    names = names_of(model)

    def add_state() -> list[dict[str, Any]]:
        for each in shells:
            inside, exact = _state_of(each, names).saved()
            section = saved.setdefault("optim", {"state": {}, "param_groups": []})
            section["state"].update(inside["state"])
            section["param_groups"] += inside["param_groups"]
            if exact:
                saved.setdefault("master", {}).update(exact)
        groups: list[dict[str, Any]] = saved["optim"]["param_groups"] if shells else []
        return groups

    if not is_divided(model):
        add_state()
        return saved
    session = current()
    holdings = everyones(session, lambda: holding_of(model, shells, own, add_state()))
    refuse_several(holdings)
    mine = written_by(holdings, session.comm.rank)
    if shells:
        saved["optim"]["param_groups"] = merged_groups([each.groups for each in holdings])
    for section in (saved["model"], saved.get("optim", {}).get("state", {}), saved.get("master", {})):
        for name in [name for name in section if name not in mine]:
            del section[name]
    return saved


def save_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: _Optimizers = None,
    *,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
) -> Future[None]:
    """Write a checkpoint into the folder `path`, which all ranks share. On every rank, between ``step()`` and backward.

    Each rank writes its share; what all ranks have, one of them does. ``torch.distributed.checkpoint`` loads it in one
    process and with DDP and FSDP2, and :func:`load_checkpoint` at any number of ranks. What ranks write of a model that is
    divided by `model_parallel` or `pipe` is one checkpoint of the whole model, which is loaded in one process, and at any
    other grid.

    Args:
        path: the same on all ranks. A checkpoint that is there is overwritten, and lost if the job is killed meanwhile.
        model: what is trained.
        optimizer: the distributed optimizer, or several; None saves the model alone.
        extra: what else to save: rank 0's values, by names other than "model", "optim" and "master".
        background: return once this rank has copied what it holds to host memory, and write it on a thread while training
            goes on.

    Returns a future. Without `background`, it is done. With it, ``result()`` waits until all ranks have written, and raises
    what has gone wrong, which is logged, too. The next such call, and ``shutdown()``, wait for it.

    Raises ``RuntimeError`` on every rank where one could not write, or where torch.distributed has no default group with
    all of them; ``ValueError`` for `co2`, whose ranks have values of their own, for optimizers of a process set whose model
    is not divided, for state of a divided parameter that is not of its shape, and for names in `extra` that are taken.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    session = current()
    taken = [name for name in extra or () if name in _OURS]
    if taken:
        raise ValueError(f"extra has {first_few(taken)}, under which the model and the optimizer are saved: rename it")
    together = among(session, "save_checkpoint()")
    shells = _shells(model, optimizer)
    before_saving(model, "save_checkpoint()", shells)
    state = sharded_state_dict(model, optimizer)
    if session.comm.rank == 0:
        state.update({name: _sealed(value) for name, value in (extra or {}).items()})
    else:  # what every rank has, and rank 0's counts
        if not is_divided(model):
            shares = {plain(name) for name, _ in model.named_parameters(remove_duplicate=False)}
            state["model"] = {name: value for name, value in state["model"].items() if name in shares}
        state.get("optim", {}).pop("param_groups", None)
    if background:
        return background_of(session, together).save(_copied(state), path)
    with _quietly(), told_by_all(f"write the checkpoint in {path}"):
        save(state, checkpoint_id=path, **together)
    done: Future[None] = Future()
    done.set_result(None)
    return done


def load_checkpoint(
    path: str | os.PathLike[str], model: torch.nn.Module, optimizer: _Optimizers = None
) -> dict[str, Any]:
    """Load a checkpoint from the folder `path`. On every rank, between ``step()`` and backward, at any number of ranks.

    It may be one of :func:`save_checkpoint`, or one that ``torch.distributed.checkpoint`` has saved of
    ``get_state_dict()``, under "model" and "optim", in one process or with DDP or FSDP2. Each rank reads the chunks that
    its own ranges meet, one at a time; of a model that is divided by `model_parallel` or `pipe`, those of its parts.

    Groups of parameters get the hyper-parameters that their parameters had. `optimizer` is the distributed one, or
    several; None loads the model alone.

    Returns what else the checkpoint has, by name. Raises ``ValueError`` on every rank, before anything is changed, where
    names, shapes or groups differ, ``FileNotFoundError`` where there is no checkpoint, and as :func:`save_checkpoint`.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    session = current()
    together = among(session, "load_checkpoint()")
    entries = _entries(Path(path))
    shells = _shells(model, optimizer)
    own = own_of(model)
    divided = is_divided(model)
    holdings = (
        [holding_of(model, shells, own)] if not divided else everyones(session, lambda: holding_of(model, shells, own))
    )
    refuse_several(holdings)
    _compare(path, {name: shape for each in holdings for name, shape in each.shapes.items()}, entries["model"])
    names = names_of(model)
    states = [_state_of(each, names) for each in shells]
    if shells and not entries["optim"]:
        raise ValueError(f"the checkpoint in {path} has no state of an optimizer (under 'optim'): load the model alone")
    before_loading(model, "load_checkpoint()", shells)

    def read(targets: dict[str, Any]) -> dict[str, Any]:
        with _quietly(), told_by_all(f"read the checkpoint in {path}"):
            load(targets, checkpoint_id=path, **together)
        return targets

    exact = {entry.key.removeprefix("master."): entry for entry in entries["master"]}
    groups = [_groups_of(state, entries["optim"], read) for state in states]
    targets: dict[str, Any] = {}

    def plan() -> None:
        for state, told in zip(states, groups, strict=True):
            inside = by_parameter(entries["optim"], "state", _all(state.groups))
            targets.update(state.targets(inside, exact, groups_for(state.groups, told)))

    if divided:  # ranks have other parameters, so one may find what others do not
        everyones(session, plan)
    else:
        plan()
    for entry in entries["model"]:
        if _name(entry) in own:
            shown = own[_name(entry)].shown
            targets[entry.key] = shown if isinstance(shown, torch.Tensor) else _room(entry)
    others = [entry for name, inside in entries.items() if name not in _OURS for entry in inside]
    targets |= {entry.key: _room(entry) for entry in others}
    with torch.no_grad():
        read(targets)
    _load_rest(model, own, entries["model"], targets)
    for state in states:
        state.take(targets)
    share_again(session, model)
    return {
        name: _unsealed(value) for name, value in nest((entry.path, targets[entry.key]) for entry in others).items()
    }


def _groups_of(
    state: ShardedState, entries: Sequence[Entry], read: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved groups of hyper-parameters; where an optimizer's state was saved flat, one for each parameter."""
    rest = [entry for entry in entries if entry.path[1:2] == ("param_groups",)]
    apart = by_parameter(entries, "param_groups", _all(state.groups))
    told = read({entry.key: _room(entry) for entry in (*rest, *(one for each in apart.values() for _, one in each))})
    groups: list[dict[str, Any]] = nest((entry.path[1:], told[entry.key]) for entry in rest).get("param_groups", [])
    for name, inside in apart.items():
        groups.append({**nest((path, told[entry.key]) for path, entry in inside), "params": [name]})
    return groups


def _all(groups: Iterable[Iterable[str]]) -> list[str]:
    return [name for names in groups for name in names]


def _shells(model: torch.nn.Module, optimizer: _Optimizers) -> list[Any]:
    """The distributed optimizers that were given, of which each rank has a share. Raises where it is otherwise."""
    session = current()
    given = (
        [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    )
    shells = [session.registry.shell_of(each) for each in given]
    for each in shells:
        if not isinstance(each, DistributedOptimizer):
            raise TypeError(f"the optimizer should be a DistributedOptimizer and is {type(each).__name__}")
    for each in dict.fromkeys((*shells, *owners_of(model))):
        if type(each).state_dict is not DistributedOptimizer.state_dict:
            raise ValueError(
                f"{each.strategy.name}'s ranks have parameters and state of their own, and a sharded checkpoint has one of "
                "each: torch.save() model.state_dict() and optimizer.state_dict()"
            )
        if each._everyone.size != session.comm.size and not is_divided(model):
            raise ValueError(
                f"a sharded checkpoint is written by all {session.comm.size} ranks of the job, and the optimizer has a "
                f"process set of {each._everyone.size}: torch.save() model.state_dict() and optimizer.state_dict()"
            )
    return shells


def _state_of(shell: Any, names: Mapping[int, str]) -> ShardedState:
    from overlap.state.sharded_state import ShardedState

    return ShardedState(shell._engine, shell._inner, shell._full_state, names)


@contextmanager
def _quietly() -> Iterator[None]:
    """A context without torch's warnings that a folder is overwritten, and that a process is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield


def _sealed(value: Any) -> Any:
    """A `value` that is written in one piece: torch takes dictionaries apart, and makes strings of their keys."""
    return (_SEAL, value) if isinstance(value, Mapping | list | tuple) else value


def _unsealed(value: Any) -> Any:
    return value[1] if isinstance(value, tuple) and value[:1] == (_SEAL,) else value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_copied(inside) for inside in value]
    return copy.deepcopy(value)


# - What is in a checkpoint


def _entries(path: Path) -> dict[str, list[Entry]]:
    """All that the checkpoint has, by the first part of its name."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not (path / ".metadata").exists():
        raise FileNotFoundError(
            f"{path} has no checkpoint: a folder that save_checkpoint() has written has a file .metadata"
        )
    metadata = FileSystemReader(path).read_metadata()
    paths: Mapping[str, Any] = metadata.planner_data or {}
    found: dict[str, list[Entry]] = {name: [] for name in _OURS}
    for key, inside in metadata.state_dict_metadata.items():
        first, _, rest = key.partition(".")
        keys = tuple(paths.get(key, (key,)))
        if len(keys) == 1 and first in _OURS and rest:
            keys = (first, rest)  # whoever saved it has made it flat
        entry = Entry(key, keys)
        if isinstance(inside, TensorStorageMetadata):
            entry = Entry(key, keys, inside.size, inside.properties.dtype)
        found.setdefault(str(keys[0]), []).append(entry)
    return found


def _name(entry: Entry) -> str:
    return str(entry.path[1])


def _room(entry: Entry) -> Any:
    return None if entry.shape is None else torch.empty(entry.shape, dtype=entry.dtype)


def _compare(path: str | os.PathLike[str], own: Mapping[str, tuple[int, ...] | None], entries: Sequence[Entry]) -> None:
    """Raise ``ValueError`` where names and shapes, `own` of the whole model, are not those of the checkpoint."""
    saved = {_name(entry): entry.shape for entry in entries}
    tensors = {name: shape for name, shape in own.items() if shape is not None}
    missing = [name for name in tensors if name not in saved]
    unexpected = [name for name in saved if name not in own]
    differ = [
        f"{name!r} is {_shape(saved[name])} there and {shape} here"
        for name, shape in tensors.items()
        if name in saved and saved[name] != shape
    ]
    wrong = [
        *([f"it has no {first_few(missing)}"] if missing else []),
        *([f"the model has no {first_few(unexpected)}"] if unexpected else []),
        *differ[:4],
    ]
    if wrong:
        raise ValueError(f"the checkpoint in {path} is of another model: {'; '.join(wrong)}")


def _shape(shape: torch.Size | None) -> str:
    return "no tensor" if shape is None else str(tuple(shape))


def _load_rest(
    model: torch.nn.Module, own: Mapping[str, Own], entries: Iterable[Entry], read: Mapping[str, Any]
) -> None:
    """What is no parameter in shares, such as extra state, is loaded as ever, by the modules."""
    from overlap.state.chunks import Chunked

    values = nest((entry.path[1:], read[entry.key]) for entry in entries if _name(entry) in own)
    whole = {
        own[name].key: (
            view_like(value.held, int(value.held.storage_offset()), own[name].value)
            if isinstance(value, Chunked)
            else value
        )
        for name, value in values.items()
        if not isinstance(own[name].value, Chunked)
    }
    model.load_state_dict(whole, strict=False)
