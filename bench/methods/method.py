"""What a benchmark asks of a method: join the job, distribute a model and its optimizer, settle, leave."""

from __future__ import annotations

import ast
import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

__all__ = [
    "MakeOptimizer",
    "Method",
    "MethodUnavailable",
    "Place",
    "family_of",
    "parse_spec",
    "refuse_unknown",
    "tensor_bytes",
]

Optimizer = torch.optim.Optimizer
# Options that only tune a method: sizes of what travels, times of cycles, layouts in memory. Any other makes another
# method of it: what is left out here is compared under a name of its own, and not as the fastest of its method.
_SEARCHED = frozenset(
    {
        *("threshold_mb", "num_nearby_layers", "num_groups", "tune"),
        *("merge_below_kb", "profile_steps", "partition_mb", "credit_mb"),
        *("bucket_mb", "view", "broadcast_buffers", "reshard", "unit_mb", "unit_layers"),
        *("fusion_mb", "cycle_ms", "yield_when_idle"),
    }
)
# Values that say what is so anyway.
_PLAIN: Mapping[str, Any] = {
    "eager": False,
    "policy": "rsag",
    "exclude_parts": "",
    "strategy": "dear",
    "gather_dtype": None,
    "asc": False,
}
# (class, keyword arguments): methods build the optimizer themselves, as some of them must see the class.
MakeOptimizer = tuple[Callable[..., Optimizer], Mapping[str, Any]]


class MethodUnavailable(RuntimeError):
    """The method cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Place:
    rank: int
    size: int


class Method(ABC):
    """One way to train on several ranks, with its options.

    ``launchers`` are the ways to start its ranks, the preferred one first. ``defaults`` are its options; a value of
    None means the method's own default. ``environment`` is set for every rank before Python starts.
    """

    name: ClassVar[str]
    launchers: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Mapping[str, Any]] = {}
    timeline_variable: ClassVar[str | None] = None  # names the file to record a timeline in, where the method can

    def __init__(self, options: Mapping[str, Any]) -> None:
        refuse_unknown(self.name, options, tuple(self.defaults))
        for name, value in options.items():
            _check(f"{name} of {self.name}", value, isinstance(self.defaults[name], bool))
        self.options = {**self.defaults, **options}

    @property
    def environment(self) -> dict[str, str]:
        return {}

    def look(self) -> None:  # noqa: B027  most methods are always here
        """Raises :class:`MethodUnavailable` when the method cannot run on this machine."""

    @abstractmethod
    def join(self, device: torch.device) -> Place:
        """Connect to the other ranks. On every rank."""

    @abstractmethod
    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """The model to call and the optimizer to step. On every rank."""

    def tuning(self, optimizer: Optimizer) -> bool:
        """Whether the method still changes itself by what it measures: such steps are not timed. The same on every rank."""
        return False

    def settle(self, optimizer: Optimizer) -> None:  # noqa: B027  most methods leave nothing in flight
        """Wait for what the last step left in flight."""

    def state_bytes(self, optimizer: Optimizer) -> int:
        """Bytes of optimizer state on this rank."""
        return tensor_bytes(optimizer.state)

    @abstractmethod
    def leave(self) -> None:
        """Disconnect. On every rank."""


def refuse_unknown(method: str, options: Iterable[str], known: Sequence[str]) -> None:
    """Raise ``ValueError`` for options that `method` does not know."""
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; is {near[0]} meant?" if near else ""
            raise ValueError(f"{method} has the options {', '.join(known) or 'none'}; it does not know {name}{hint}")


def _check(what: str, value: Any, switch: bool) -> None:
    if switch and value not in (True, False):
        raise ValueError(f"{what} should be True or False and is {value!r}")
    if not switch and value is not None and not (isinstance(value, int | float) and value >= 0):
        raise ValueError(f"{what} should be a number of at least 0 and is {value!r}")


def tensor_bytes(state: Any) -> int:
    """Bytes of all tensors in nested mappings and sequences; of a sharded tensor, this rank's part."""
    if isinstance(state, torch.Tensor):
        local = state.to_local() if hasattr(state, "to_local") else state
        return int(local.numel() * local.element_size())
    if isinstance(state, Mapping):
        return sum(tensor_bytes(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(tensor_bytes(value) for value in state)
    return 0


def family_of(spec: str) -> str:
    """The method with the options that make it another one: ``"dear:eager=True"`` of ``"dear:threshold_mb=4,eager=True"``.

    Settings of the searched options are of one family, of which the fastest counts.
    """
    name, options = parse_spec(spec)
    own = sorted(key for key in options if not (key in _SEARCHED or (key in _PLAIN and options[key] == _PLAIN[key])))
    return ":".join([name, ",".join(f"{key}={options[key]}" for key in own)]) if own else name


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """``"ddp:bucket_mb=4"`` to ``("ddp", {"bucket_mb": 4})``; values are Python literals, else text."""
    name, _, rest = spec.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if not equals or not key:
            raise ValueError(f"an option of a method is written name=value; {spec!r} holds {part!r}")
        try:
            options[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = text
    return name, options
