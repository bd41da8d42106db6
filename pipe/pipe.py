"""``Pipe``: a ``Sequential`` in stages, through which micro-batches follow one another."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast, overload

import torch
from torch.utils._pytree import tree_map

from pipe.batch_norm import DeferredBatchNorm
from pipe.checkpointing import MODES, checkpointed, stop
from pipe.micro_batches import cut, put_together
from pipe.schedule import ticks
from pipe.skip import Key, Skippable, holding, verify_skippables

if TYPE_CHECKING:
    from overlap.horovod.mesh import Mesh

__all__ = ["Pipe", "checked_balance"]

_MOVED = "the stages of a Pipe have devices of their own: give them as devices="


class Pipe(torch.nn.Module):
    """A ``Sequential`` whose consecutive layers are stages, on a device each, which work on several micro-batches at once.

    Args:
        module: what is cut into stages. Its layers are moved, not copied.
        balance: the number of layers of each stage: see :func:`pipe.balance_by_time`.
        devices: one for each stage, as ``[0, 1]`` or ``["cuda:0", "cuda:1"]``; None is all GPUs, or the CPU where there
            are none. Several stages may share one: with ``["cpu", "cpu"]`` stages are on threads. Backward of what is on
            the CPU runs on one thread, as torch has it.
        chunks: the number of micro-batches that a batch is cut into, along its first dimension.
        checkpoint: which micro-batches are computed again in backward instead of being kept: ``"always"``,
            ``"except_last"`` or ``"never"``; in training only.
        deferred_batch_norm: running statistics of batch norms are those of the batch, not of micro-batches:
            :class:`.DeferredBatchNorm`.

    As ``torchgpipe.GPipe`` and ``fairscale.nn.Pipe`` (GPipe: Huang et al., 2019). Input and output are a tensor or a
    structure of tensors; the input goes to the first device, and the output is on the last. Values and gradients are those
    of the `module` that goes through one micro-batch after the other. `partitions` has the stages.

    In a tick, stages that work run side by side:

        tick      0    1    2    3    4
        stage 0   0    1    2                   the numbers are those of micro-batches
        stage 1        0    1    2
        stage 2             0    1    2

    On the CPU, threads share one generator of random numbers. So stages that draw some, such as dropout, run one after the
    other there, which the first pass in training finds out. Raises ``RuntimeError`` for a stage that begins to draw later.

    With a `mesh`, each rank along its axis ``pipeline`` has a stage, over ``torch.distributed.pipelining``:
    ``Pipe(module, balance, mesh=mesh, chunks=8, schedule="1f1b", loss=function)`` on every rank of the job, with the same
    `module` on those of a pipeline. It may be a causal model of transformers (gpt2, llama, mistral, qwen2, qwen3), whose
    blocks `balance` counts. `balance` may be ``"auto"``, with a `sample` of the input; `schedule` is ``"1f1b"``,
    ``"gpipe"``, or, of ranks with several stages each, ``"interleaved1f1b"`` (Narayanan et al., 2021) or ``"loopedbfs"``
    (Lamy-Poirier, 2023). Train by :meth:`.StagePipe.step`.

    Raises ``TypeError`` for another module than a ``Sequential``, and where skip connections do not fit; ``ValueError``
    for a balance that does not, for more stages than devices, and for a parameter that stages on two devices share.
    """

    def __new__(cls, *_args: Any, mesh: Any = None, **_options: Any) -> Any:
        if mesh is None:
            return super().__new__(cls)
        from pipe.stage import StagePipe

        return super().__new__(StagePipe)

    @overload
    def __init__(
        self,
        module: torch.nn.Sequential,
        balance: Sequence[int],
        *,
        devices: Sequence[int | str | torch.device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None: ...

    @overload
    def __init__(
        self,
        module: torch.nn.Module,
        balance: Sequence[int] | Literal["auto"],
        *,
        mesh: Mesh,
        chunks: int = 1,
        schedule: str = "1f1b",
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        sample: Any = None,
    ) -> None: ...

    def __init__(
        self,
        module: torch.nn.Module,
        balance: Sequence[int] | str,
        *,
        devices: Sequence[int | str | torch.device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        **across: Any,
    ) -> None:
        super().__init__()
        if across:
            raise TypeError(f"{', '.join(across)}: of a Pipe across ranks, which has a mesh=")
        if not isinstance(module, torch.nn.Sequential):
            raise TypeError(
                f"module should be an nn.Sequential, whose layers are stages, and is {type(module).__name__}"
            )
        if chunks < 1:
            raise ValueError(f"chunks should be at least 1 and is {chunks}")
        if checkpoint not in MODES:
            raise ValueError(f"checkpoint should be one of {', '.join(map(repr, MODES))} and is {checkpoint!r}")
        self.balance, self.chunks, self.checkpoint = checked_balance(balance, len(module)), int(chunks), checkpoint
        self.devices = _devices(devices, len(self.balance))
        verify_skippables(module)
        if deferred_batch_norm:
            DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        layers = iter(module._modules.items())  # one that stands there twice, too
        stages = [torch.nn.Sequential(OrderedDict(next(layers) for _ in range(size))) for size in self.balance]
        _refuse_shared(stages, self.devices)
        self.partitions = torch.nn.ModuleList(
            stage.to(device) for stage, device in zip(stages, self.devices, strict=True)
        )
        self._pops = [_keys(stage, "pops", "stashes") for stage in stages]  # from stages before
        self._stashes = [_keys(stage, "stashes", "pops") for stage in stages]  # for stages behind
        self._draws: set[int] | None = None  # the stages on the CPU that draw random numbers, once that is known

    # - Looks like the Sequential

    def _layers(self) -> list[torch.nn.Module]:
        return [layer for stage in self.partitions for layer in cast(torch.nn.Sequential, stage)]

    def names_in_whole(self, name: str) -> tuple[str, ...]:
        """What the module that was cut calls what is `name` in the state dict of this one: for checkpoints."""
        return (name.split(".", 2)[2],)

    def __len__(self) -> int:
        return sum(self.balance)

    def __getitem__(self, index: int) -> torch.nn.Module:
        return self._layers()[index]

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._layers())

    def cuda(self, device: Any = None) -> NoReturn:  # type: ignore[override]
        """Raise ``TypeError``, as :meth:`cpu`, and :meth:`to` with a device."""
        raise TypeError(_MOVED)

    def cpu(self) -> NoReturn:  # type: ignore[override]
        raise TypeError(_MOVED)

    def to(self, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """As a module's, for types; a device raises ``TypeError``."""
        if options.get("device") is not None or any(isinstance(each, str | int | torch.device) for each in args):
            raise TypeError(_MOVED)
        if "tensor" in options or any(isinstance(each, torch.Tensor) for each in args):
            raise TypeError(_MOVED)
        return super().to(*args, **options)

    def step(self, *inputs: Any, target: Any = None) -> torch.Tensor:
        """Of a Pipe across ranks: :meth:`.StagePipe.step`. Raises ``RuntimeError`` of one in one process."""
        raise RuntimeError("step() is of a Pipe across ranks (mesh=…); call this one, and backward() of a loss")

    def explain(self) -> str:
        """Of a Pipe across ranks: :meth:`.StagePipe.explain`. Raises ``RuntimeError`` of one in one process."""
        raise RuntimeError("explain() is of a Pipe across ranks (mesh=…)")

    # - Forward

    def forward(self, *inputs: Any) -> Any:
        batch = inputs[0] if len(inputs) == 1 else inputs
        parts = cut(batch, self.chunks)
        skips: list[dict[Key, torch.Tensor | None]] = [{} for _ in parts]
        training = self.training and torch.is_grad_enabled()
        until = stop(self.checkpoint, len(parts)) if training else 0
        for part in self.modules():
            if isinstance(part, DeferredBatchNorm):
                part.micro_batches = len(parts)
        watched = self._watched() if self.training and self._draws is None else None
        for tick in ticks(len(parts), len(self.balance)):
            for number, stage in tick:
                parts[number] = _moved(parts[number], self.devices[stage])
            calls = [
                (stage, number, parts[number], _moved(self._taken(skips[number], stage), self.devices[stage]))
                for number, stage in tick
            ]
            for (number, _), (parts[number], left) in zip(tick, self._run(calls, until, watched), strict=True):
                skips[number].update(left)
        if watched is not None:
            self._draws = watched
        return put_together(parts)

    def _taken(self, skips: dict[Key, torch.Tensor | None], stage: int) -> dict[Key, torch.Tensor | None]:
        return {key: skips.pop(key) for key in self._pops[stage]}

    def _watched(self) -> set[int] | None:
        """An empty set, where stages on the CPU would run side by side, to be filled with those that draw."""
        return set() if sum(device.type == "cpu" for device in self.devices) > 1 else None

    def _run(
        self, calls: Sequence[tuple[int, int, Any, Any]], until: int, watched: set[int] | None
    ) -> list[tuple[Any, Mapping[Key, torch.Tensor | None]]]:
        """What each call returns: of a stage, with a micro-batch, its values, and what it pops."""
        if len(self.balance) == 1 or watched is not None:
            return [self._watch(call, until, watched) for call in calls]
        alone = self._draws or set()
        before = torch.get_rng_state() if self.training else None
        here = _Modes()
        futures = {
            call[0]: _thread(call[0]).submit(here.run, self._call, call, until)
            for call in calls
            if call[0] not in alone
        }
        for future in futures.values():  # whatever one raises, none goes on behind our back
            future.exception()
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            stages = ", ".join(str(call[0]) for call in calls)
            raise RuntimeError(
                f"one of the stages {stages} of the Pipe has begun to draw random numbers, which stages on one device "
                "share: let each draw, if ever, in the first pass in training"
            )
        return [futures[call[0]].result() if call[0] in futures else self._call(call, until) for call in calls]

    def _watch(self, call: tuple[int, int, Any, Any], until: int, watched: set[int] | None) -> Any:
        before = None if watched is None else torch.get_rng_state()
        found = self._call(call, until)
        if watched is not None and not torch.equal(cast(torch.Tensor, before), torch.get_rng_state()):
            watched.add(call[0])
        return found

    def _call(self, call: tuple[int, int, Any, Any], until: int) -> Any:
        stage, number, values, popped = call
        module = self.partitions[stage]
        leaves = self._stashes[stage]

        def run(values: Any, popped: Mapping[Key, torch.Tensor | None]) -> Any:
            with holding(popped) as store:
                output = module(values)
                return output, {key: store[key] for key in leaves}

        try:
            return checkpointed(module, run, values, popped) if number < until else run(values, popped)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"(in stage {stage} of the Pipe, on {self.devices[stage]}, with micro-batch {number})")
            raise


class _Modes:
    """What torch keeps for each thread, taken from this one to those that run stages."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]

    def run(self, function: Any, *args: Any) -> Any:
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad), ExitStack() as stack:
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            return function(*args)


_threads: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _thread(stage: int) -> ThreadPoolExecutor:
    """The thread of this process that runs this stage of any Pipe.

    Always the same one: of nodes that are ready, backward takes the one that its thread has made last, so gradients are
    added up from the last micro-batch to the first.
    """
    key = os.getpid(), stage
    if key not in _threads:
        _threads[key] = ThreadPoolExecutor(1, thread_name_prefix=f"pipe stage {stage}")
    return _threads[key]


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map(lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, values)


def checked_balance(balance: Sequence[int] | str, layers: int) -> list[int]:
    """`balance` as numbers; raises ``ValueError`` where it is not that of so many `layers`."""
    if isinstance(balance, str):
        raise ValueError(f"balance={balance!r} should be the number of layers of each stage: see pipe.balance_by_time")
    found = [int(size) for size in balance]
    if not found or min(found) < 1 or sum(found) != layers:
        raise ValueError(
            f"balance={found} has {sum(found)} layers, and the module has {layers}: give the number of layers of each "
            "stage, at least 1, as pipe.balance_by_time() finds it"
        )
    return found


def _devices(devices: Sequence[int | str | torch.device] | None, stages: int) -> list[torch.device]:
    if devices is None:
        cards = torch.cuda.device_count()
        devices = list(range(cards)) if cards else ["cpu"] * stages
    if len(devices) < stages:
        raise ValueError(f"{stages} stages, and {len(devices)} devices: give one for each stage")
    return [torch.device("cuda", each) if isinstance(each, int) else torch.device(each) for each in devices[:stages]]


def _refuse_shared(stages: Sequence[torch.nn.Sequential], devices: Sequence[torch.device]) -> None:
    first: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            known = first.setdefault(id(parameter), number)
            if devices[known] != devices[number]:
                raise ValueError(
                    f"{name!r} is a parameter of stage {known} on {devices[known]} and of stage {number} on "
                    f"{devices[number]}: stages that share a parameter share a device"
                )


def _keys(stage: torch.nn.Sequential, wanted: str, other: str) -> list[Key]:
    """The skip connections that `stage` pops and does not stash, or the other way round."""
    parts = [part for part in stage.modules() if isinstance(part, Skippable)]
    mine = [key for part in parts for key in part.keys(getattr(part, wanted))]
    theirs = {key for part in parts for key in part.keys(getattr(part, other))}
    return [key for key in mine if key not in theirs]
