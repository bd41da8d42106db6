"""A model's weights as Hugging Face's ``from_pretrained`` loads them, saved and loaded where ranks have shares of them."""

from __future__ import annotations

import copy
import json
import mmap
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overlap.core.bucket import Slot
from overlap.core.engine import Engine
from overlap.job.memory.host_memory import host_memory
from overlap.job.session import current
from overlap.optimizer.once_per_host import Memory, common, frozen_memory, place_once
from overlap.optimizer.saving.divided import everyones, is_divided, naming_of
from overlap.optimizer.shares import before_loading, before_saving, plain, state_of
from overlap.optimizer.whole import full_state_dict
from overlap.state.boxes import dims_in_memory
from overlap.state.deferred_init import is_deferred, move
from overlap.state.saved import first_few
from overlap.state.tensor_files import (
    INDEX,
    Described,
    Place,
    find,
    index_of,
    map_tensor,
    plan_files,
    read_range,
    remove_others,
    write,
)
from overlap.transport.memory import is_dense, to_flat
from overlap.transport.objects import NotSent, allgather_made, broadcast_made

__all__ = ["load_pretrained", "save_pretrained"]


class _Share(NamedTuple):
    """Stands in a state dict for a parameter of which each rank has a share."""

    engine: Engine
    slot: Slot


def save_pretrained(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_mb: float = 5000,
) -> None:
    """Write a model's weights into the folder `path`, as ``from_pretrained`` loads them. On every rank, between steps.

    Rank 0 writes ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on with
    ``model.safetensors.index.json``, and ``config.json`` and ``generation_config.json`` where the model has such. A
    parameter of which each rank has a share is gathered while it is written, on rank 0 alone, which has one at a time. A
    model that is divided by `model_parallel` or `pipe` is gathered before. Weights that several modules share are written
    once. What the folder had before is replaced once all is written.

    Args:
        model: of Hugging Face, or any other.
        path: a folder, which rank 0 makes.
        dtype: what floating-point values are rounded to; None: they stay as they are.
        max_shard_mb: a file has at most so many MB (2^20 bytes) of weights, or one tensor.

    Raises ``RuntimeError`` on every rank of several where rank 0 could not write, and ``ValueError`` for what is no tensor,
    or of a dtype that such files do not have.
    """
    session = current()
    divided = is_divided(model)
    if divided:
        values = full_state_dict(model)
    else:
        before_saving(model, "save_pretrained()")
        values = _state_of(model)

    def describe() -> dict[str, Described]:
        told = {name: _described(name, value, dtype) for name, value in values.items()}
        kept = _without_tied(model, list(values))
        return {name: told[name] for name in values if name in kept}

    described = everyones(session, describe)[0] if divided else describe()
    files = plan_files(described, max_shard_mb * 2**20)
    folder = Path(path)

    def on_rank_0(make: Callable[[], None]) -> None:
        try:  # also so that others do not wait for longer than a file takes
            broadcast_made(session.control, make, 0)
        except NotSent as error:
            raise RuntimeError(f"rank {error.sender} could not save the model in {folder}: {error.reason}") from error

    def value_of(name: str) -> torch.Tensor:
        value = values[name]
        return _gathered(value) if isinstance(value, _Share) else value

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _save_config(model, folder, dtype)

    def finish() -> None:
        for file in files:
            os.replace(folder / f"{file}.part", folder / file)
        if len(files) > 1:
            (folder / INDEX).write_text(index_of(files, described))
        remove_others(folder, (*files, INDEX) if len(files) > 1 else files)

    on_rank_0(begin)
    for file, names in files.items():
        on_rank_0(lambda file=file, names=names: write(folder / f"{file}.part", names, described, value_of))  # type: ignore[misc]
    on_rank_0(finish)


def load_pretrained(model: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Load weights in ``safetensors`` files into `model`, which may be wrapped already. On every rank, between steps.

    Each rank reads its share of each parameter, and all of what it keeps whole; values are rounded to the model's dtypes.
    Parameters that several modules share may be there under one of their names. Frozen parameters on the CPU, of the dtype
    that the file has, are mapped from it, so that a host has them in memory once: the file must not be changed meanwhile.
    Others that ranks of a host share are read by one of them.

    Args:
        model: of Hugging Face, or any other.
        path: a file, or a folder as ``save_pretrained`` writes it, which all ranks see.

    Raises ``ValueError`` on every rank, before anything is changed, where names or shapes differ,
    ``FileNotFoundError`` where there are no such files, and ``RuntimeError`` on every rank where one could not read on.
    """
    places = find(Path(path))
    values = _state_of(model)
    _compare(path, model, values, places)
    before_loading(model, "load_pretrained()")
    failures: list[Exception] = []
    done = _map(model, places)
    done |= _read_once(model, places, done, failures)
    values = _state_of(model)

    def read() -> None:
        if failures:
            raise failures[0]
        with torch.no_grad():
            for name, value in values.items():
                if name in places and name not in done:
                    _read(places[name], value)

    try:  # nobody goes on, and asks for others' shares, before all have read theirs
        allgather_made(current().control, read)
    except NotSent as error:
        raise RuntimeError(f"rank {error.sender} could not load the weights in {path}: {error.reason}") from error


# - What a model has


def _state_of(model: torch.nn.Module) -> dict[str, Any]:
    """The model's tensors by name, with a :class:`_Share` for each of which this rank has a share alone."""
    return {plain(name): value for name, value in state_of(model, _Share).items()}


def _like(value: Any) -> torch.Tensor | None:
    if isinstance(value, _Share):
        return value.slot.like
    return value if isinstance(value, torch.Tensor) else None


def _described(name: str, value: Any, dtype: torch.dtype | None) -> Described:
    like = _like(value)
    if like is None or like.layout is not torch.strided or like.device.type == "meta":
        what = type(value).__name__ if like is None else f"{like.layout} on {like.device}"
        raise ValueError(f"save_pretrained() writes tensors with values, and {name!r} is {what}")
    rounded = dtype is not None and like.is_floating_point()
    return Described(tuple(like.shape), dtype if rounded and dtype is not None else like.dtype)


def _without_tied(model: torch.nn.Module, names: Sequence[str]) -> set[str]:
    """Of the names of one tensor the one under which Hugging Face's model has it, else the first one."""
    own = getattr(model, "_orig_mod", model)
    told = getattr(own, "all_tied_weights_keys", None) or getattr(own, "_tied_weights_keys", None) or ()
    others = re.compile("|".join(f"(?:{pattern})" for pattern in told) or r"(?!)")
    ignored = set(getattr(own, "_keys_to_ignore_on_save", None) or ())
    kept: set[str] = set()
    for same in _tied(model, names):
        wanted = [name for name in same if name not in ignored]
        kept.update([*(name for name in wanted if others.search(name) is None), *wanted][:1])
    return kept


def _tied(model: torch.nn.Module, names: Sequence[str]) -> list[list[str]]:
    """The `names` in groups that are one parameter, or one buffer."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    naming = naming_of(model)
    known = {each: id(tensor) for name, tensor in tensors for each in naming(name)}
    found: dict[Any, list[str]] = {}
    for name in names:
        found.setdefault(known.get(name, name), []).append(name)
    return list(found.values())


# - Saving


def _gathered(share: _Share) -> torch.Tensor:
    owner = next(one for one in current().registry.optimizers if one._engine is share.engine)
    values: dict[int, torch.Tensor] = owner._full_state.parameters.gathered([share.slot])
    return values[share.slot.index]


def _save_config(model: torch.nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    own: Any = getattr(model, "_orig_mod", model)
    config: Any = getattr(own, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(own).__name__]
        kept = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
        attribute = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # before transformers 5
        setattr(config, attribute, str(dtype or kept).removeprefix("torch."))
        config.save_pretrained(folder)
    elif isinstance(config, dict):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation: Any = getattr(own, "generation_config", None)
    if hasattr(generation, "save_pretrained") and getattr(own, "can_generate", bool)():
        generation.save_pretrained(folder)


# - Loading


def _compare(
    path: str | os.PathLike[str], model: torch.nn.Module, values: Mapping[str, Any], places: Mapping[str, Place]
) -> None:
    """Raise ``ValueError`` where the model's names and shapes are not those of the files."""
    likes = {name: like for name, value in values.items() if (like := _like(value)) is not None}
    missing = [same[0] for same in _tied(model, list(likes)) if not any(name in places for name in same)]
    unexpected = [name for name in places if name not in likes]
    differ = [
        f"{name!r} is {places[name].shape} there and {tuple(like.shape)} here"
        for name, like in likes.items()
        if name in places and places[name].shape != tuple(like.shape)
    ]
    wrong = [
        *([f"they have no {first_few(missing)}"] if missing else []),
        *([f"the model has no {first_few(unexpected)}"] if unexpected else []),
        *differ[:4],
    ]
    if wrong:
        raise ValueError(f"the weights in {path} are of another model: {'; '.join(wrong)}")


def _frozen(model: torch.nn.Module, places: Mapping[str, Place]) -> list[tuple[Memory, set[str], Place]]:
    """Frozen parameters that lie alone in their memory, row by row; all names of each, and where they are in the files."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(plain(name))
    found = []
    for memory in frozen_memory(current(), model, least=0):
        tensor = memory.tensors[0]
        known = [name for name in sorted(names.get(id(tensor), ())) if name in places]
        if known and tensor.nbytes == memory.nbytes and len(memory.tensors) == 1 and tensor.is_contiguous():
            found.append((memory, names[id(tensor)], places[known[-1]]))
    return found


def _map(model: torch.nn.Module, places: Mapping[str, Place]) -> set[str]:
    """Map frozen parameters from the files that have them bit for bit, and give their names.

    Others that have no values yet get memory for those that are read.
    """
    files: dict[Path, mmap.mmap] = {}
    done: set[str] = set()
    for memory, names, place in _frozen(model, places):
        storage = map_tensor(place, files) if memory.tensors[0].dtype is place.dtype else None
        if storage is not None:
            move(memory.tensors, storage)
            done |= names
        elif is_deferred(memory.tensors[0]):
            move(memory.tensors, torch.UntypedStorage(memory.nbytes, device="cpu"))
    return done


def _read_once(
    model: torch.nn.Module, places: Mapping[str, Place], done: set[str], failures: list[Exception]
) -> set[str]:
    """Read frozen parameters that ranks of this host share, and that are not `done`, on one of them. Gives their names.

    On every rank of the job; `failures` of this one are appended.
    """
    host = host_memory(current()).comm
    if host.size == 1:
        return set()
    shared = [each for each in _frozen(model, places) if each[0].mapped and not each[1] <= done]
    by_memory = {id(memory): (names, place) for memory, names, place in shared}
    memories = common(host, [memory for memory, _, _ in shared], [place for _, _, place in shared])

    def fill(memory: Memory, values: torch.Tensor) -> None:
        place = by_memory[id(memory)][1]
        if host.rank == 0:
            try:
                into = values[: memory.nbytes].view(memory.tensors[0].dtype)
                read_range(place, 0, into.numel(), into)
            except (OSError, ValueError) as error:
                failures.append(error)

    place_once(host, memories, fill)
    return {name for memory in memories for name in by_memory[id(memory)][0]}


def _read(place: Place, value: Any) -> None:
    if not isinstance(value, _Share):
        if value.is_contiguous() and value.device.type == "cpu":
            read_range(place, 0, value.numel(), value.view(-1))
        else:
            value.copy_(_whole(place))
        return
    like = value.slot.like
    for one in value.engine.sharded.pieces_of(value.slot.bucket):  # type: ignore[arg-type]  # where it is away, it has one
        if one.slot is not value.slot or one.start == one.stop:
            continue
        if not is_dense(like) or _in_order(like):
            host = one.elements if one.elements.is_cpu else torch.empty_like(one.elements, device="cpu")
            read_range(place, one.start, one.stop, host)
            if host is not one.elements:
                one.elements.copy_(host)
        else:  # rows of the file are spread over the parameter's memory
            one.elements.copy_(to_flat(_whole(place), like)[one.start : one.stop])


def _in_order(like: torch.Tensor) -> bool:
    """Whether elements lie row by row."""
    dims = [dim for dim in dims_in_memory(like.stride()) if like.shape[dim] > 1]
    return dims == sorted(dims)


def _whole(place: Place) -> torch.Tensor:
    found = torch.empty(place.shape, dtype=place.dtype)
    read_range(place, 0, found.numel(), found.view(-1))
    return found
