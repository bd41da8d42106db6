"""The arguments that every strategy's ``DistributedOptimizer`` has: Horovod's, and those of the wrapper itself.

What kind of value each argument of a wrapper takes, checked in one place before anything is done with them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar

import torch

from overlap.core.bucket import Slot
from overlap.core.wire import returns_slices
from overlap.features.nonfinite import CHOICES
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.plan.groups import Groups
from overlap.plan.plan import Updates
from overlap.transport.communicator import ReduceOp
from overlap.transport.compression import NoneCompressor

__all__ = [
    "KINDS",
    "HorovodArguments",
    "SharedArguments",
    "check_kinds",
    "check_passes",
    "feasible",
    "parse_groups",
    "refuse_unknown",
    "refuses_unknown",
    "suggested",
]

_Make = TypeVar("_Make", bound=Callable[..., Any])


@dataclass(frozen=True)
class HorovodArguments:
    """Horovod's, but for the first two, in Horovod's order.

    Args:
        compression: what gradients become on the wire: ``Compression.none``, ``.fp16``, ``.bf16`` (summed in fp32,
            rounded once) or a class with ``compress`` and ``decompress``, whose gradients are reduced whole.
            Parameters travel in their own type, unless the strategy has a `gather_dtype`.
        backward_passes_per_step: backward passes whose gradients are summed before one reduction.
        op: ``Average`` or ``Sum`` over the ranks.
        gradient_predivide_factor: f divides by f before the sum and by size / f after it.
        num_groups: as a number in `groups`.
        groups: how many buckets, of neighbours in the order of arrival, or a list of lists of parameters that share a
            bucket; the strategy decides about parameters that are in none. Tensors of several types need several.
        sparse_as_dense: turn sparse gradients into dense ones; otherwise their rows are gathered, and every rank updates
            those parameters in full. SparseAdam, which takes no dense ones, keeps sparse ones either way.
        process_set: the ranks among which gradients are reduced. Other sets than the global one: on every rank of the
            job, each with its own; a rank outside of the set it gives trains alone.
    """

    compression: Any = NoneCompressor
    backward_passes_per_step: int = 1
    op: ReduceOp = ReduceOp.AVG
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set


@dataclass(frozen=True)
class SharedArguments(HorovodArguments):
    """What every strategy's ``DistributedOptimizer`` takes: Horovod's arguments, and seven of the wrapper itself.

    Args:
        elementwise: True promises that the optimizer updates every element from that element's gradient and state
            alone, keeps its state per parameter, and never looks at the loss, so that its work may be split and a closure
            is evaluated once; None decides by its exact type.
        per_parameter: the same promise for whole parameters, to strategies that give those to ranks (``oss``, ``fsdp``);
            True raises with others.
        sync_start: take rank 0's parameters, buffers and optimizer state at construction, but for what cannot be pickled.
        poison: fill parameters that are not gathered yet with NaN, so that a missed wait shows
            (default: environment variable ``DEAR_POISON=1``).
        broadcast_buffers: every ``step()`` gives all ranks the buffers that the first rank which trains has, as DDP does:
            rank 0's, unless it has joined. Of `named_parameters`, where that is a module; buffers that no rank changes do
            not travel. False leaves them to each rank.
        check_every: in every so many steps, the first one among them, ranks compare all parameters, by a digest that costs
            no message, and all raise with the name of one that differs. 0: never; None: as the environment variable
            ``DEAR_CHECK_EVERY`` says. See :func:`overlap.optimizer.replicas.check_replicas`.
        on_nonfinite: what follows, on all ranks, where an average is infinite or NaN. ``"raise"``: the next call that ends
            a round raises, with the parameter's name and the step; ``"skip"``: the step is left out, for which
            ranks agree in every ``step()``; ``"ignore"``: nothing. A GradScaler, which looks itself, is left alone.
    """

    elementwise: bool | None = None
    per_parameter: bool | None = None
    sync_start: bool = True
    poison: bool | None = None
    broadcast_buffers: bool = True
    check_every: int | None = None
    on_nonfinite: str = "raise"

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> SharedArguments:
        """The shared arguments among those of a strategy's function: its ``locals()`` in the first line.

        Raises ``TypeError`` for values of the wrong kind.
        """
        check_kinds(scope)
        return cls(**{field.name: scope[field.name] for field in fields(cls)})


def refuses_unknown(
    first: Callable[[Mapping[str, Any]], None] = lambda _given: None, *, of: str = "DistributedOptimizer"
) -> Callable[[_Make], _Make]:
    """A decorator: a name that the function `of` that name does not take raises ``TypeError`` with the one that is meant.

    Python itself says only that the name is unknown. `first` may refuse names with more to say. Of a class, it is the
    ``__init__`` that is decorated.
    """

    def decorate(make: _Make) -> _Make:
        known = tuple(name for name in inspect.signature(make).parameters if name != "self")

        @functools.wraps(make)
        def checked(*args: Any, **given: Any) -> Any:
            first(given)
            refuse_unknown(given, known, of)
            return make(*args, **given)

        return checked  # type: ignore[return-value]  # it takes what `make` takes

    return decorate


def refuse_unknown(given: Iterable[str], known: Sequence[str], of: str = "DistributedOptimizer") -> None:
    """Raise ``TypeError`` for the first name in `given` that is not in `known`, as the arguments of `of` are (pure)."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"is {near[0]!r} meant?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"{of}() has no argument {name!r}; {advice}")


def suggested(name: str, known: Iterable[str]) -> str:
    """The end of a message about a `name` that is not `known`: the one that is meant, or nothing (pure)."""
    near = difflib.get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f"; is {near[0]!r} meant?" if near else ""


def check_passes(passes: int) -> None:
    """Raise ``ValueError`` or ``TypeError`` for an impossible number of backward passes per step."""
    check_kinds({"backward_passes_per_step": passes})
    if passes < 1:
        raise ValueError(f"backward_passes_per_step should be at least 1 and is {passes}")


def _is_flag(value: Any) -> bool:
    # numpy's kind has that name, too, or had it before numpy 2; 0 and 1 are what scripts read from a command line.
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, Integral) and value in (0, 1))


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(_is_number(part) for part in value)


_Kind = tuple[str, Callable[[Any], bool]]
_FLAG: _Kind = "True or False", _is_flag
_WHOLE: _Kind = "a whole number", _is_whole
_NUMBER: _Kind = "a number", _is_number
_TEXT: _Kind = "a text", lambda value: isinstance(value, str)


def _or_none(kind: _Kind) -> _Kind:
    words, fits = kind
    return f"{words.replace(' or ', ', ')} or None", lambda value: value is None or fits(value)


def _or_auto(kind: _Kind) -> _Kind:
    words, fits = kind
    return f"{words.replace(' or ', ', ')} or 'auto'", lambda value: fits(value) or value == "auto"


_NUMBER_OR_AUTO = _or_none(_or_auto(_NUMBER))

#: What an argument should be, in words and as a predicate. Those that are not here are checked where they are used.
KINDS: Mapping[str, _Kind] = {
    "all_reduced": ("a share from 0 to 1, or 'auto'", lambda value: _is_number(value) or value == "auto"),
    "alpha_beta": _or_none(("a pair of numbers, seconds to start and seconds per byte,", _is_pair)),
    "asc": _FLAG,
    "backward_passes_per_step": _WHOLE,
    "bits": _or_none(_or_auto(_WHOLE)),
    "broadcast_buffers": _FLAG,
    "check_every": _or_none(("a number of steps, at least 0,", lambda value: _is_whole(value) and value >= 0)),
    "credit_mb": _NUMBER_OR_AUTO,
    "eager": _FLAG,
    "elementwise": _or_none(_FLAG),
    "exclude_parts": _TEXT,
    "fragments": _or_auto(_WHOLE),
    "fsdp_plan": _or_none(
        ("a mapping of module names to styles, 'model'", lambda value: isinstance(value, Mapping) or value == "model")
    ),
    "gap_penalty": _or_auto(("True, False or a number", lambda value: isinstance(value, bool) or _is_number(value))),
    "gradient_predivide_factor": _NUMBER,
    "groups": ("a number or a list of lists of parameters", lambda value: not isinstance(value, bool)),
    "layerwise_times": _or_none(("a mapping of names to seconds", lambda value: isinstance(value, Mapping))),
    "memory_limit_gb": _or_auto(_NUMBER),
    "merge_below_kb": _NUMBER,
    "mixing": _or_auto(_NUMBER),
    "nprocs_per_node": _or_none(_WHOLE),
    "num_groups": _WHOLE,
    "num_nearby_layers": _or_none(_WHOLE),
    "offload": ("'cpu' or None", lambda value: value in ("cpu", None)),
    "on_nonfinite": ("'raise', 'skip' or 'ignore'", lambda value: value in CHOICES),
    "outer": _TEXT,
    "outer_clip": _NUMBER_OR_AUTO,
    "outer_lr": _or_auto(_NUMBER),
    "outer_momentum": _or_auto(_NUMBER),
    "overlap_steps": _or_auto(_WHOLE),
    "partition_mb": _NUMBER_OR_AUTO,
    "per_parameter": _or_none(_FLAG),
    "poison": _or_none(_FLAG),
    "policy": _TEXT,
    "process_set": ("a ProcessSet", lambda value: isinstance(value, ProcessSet)),
    "profile_steps": _WHOLE,
    "shard_group": _or_none(
        (
            "a number of ranks, 'host' or groups of ranks",
            lambda value: (
                _is_whole(value) or value == "host" or (isinstance(value, Sequence) and not isinstance(value, str))
            ),
        )
    ),
    "sparse_as_dense": _FLAG,
    "sync_start": _FLAG,
    "threshold_mb": _or_none(("a number of MB, 'auto'", lambda value: _is_number(value) or isinstance(value, str))),
    "top_k": _or_auto(_WHOLE),
    "whole_mb": _or_auto(_NUMBER),
}


def check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for the first of `arguments` that is of the wrong kind (pure)."""
    for name, value in arguments.items():
        if name in KINDS and not KINDS[name][1](value):
            raise TypeError(f"{name} should be {KINDS[name][0]} and is {value!r}")


def feasible(
    wished: Updates,
    optimizer: torch.optim.Optimizer,
    elementwise: bool,
    compression: Any,
    *,
    per_parameter: bool = False,
) -> Updates:
    """`wished`, or whole updates where the optimizer needs more than its shard or the wire whole tensors (pure).

    Raises ``ValueError`` instead for ``EAGER``, which the user asked for.
    """
    if wished is Updates.EAGER and not elementwise:
        raise ValueError(
            f"eager=True needs an optimizer that works element by element; {type(optimizer).__name__} is not known to "
            "(elementwise=True promises that it does)"
        )
    if wished is Updates.EAGER and not returns_slices(compression):
        raise ValueError(f"eager=True updates shards, and {compression!r} gives whole tensors; use Compression.fp16")
    divisible = per_parameter if wished is Updates.OWNED else elementwise
    possible = divisible and (returns_slices(compression) or not wished.in_shards)
    return wished if possible else Updates.WHOLE


def parse_groups(num_groups: Any, groups: Any, slots: Sequence[Slot]) -> Groups:
    """Check the two arguments and return the groups; 0 where the strategy decides alone. Raises ``ValueError``."""
    if num_groups and groups is not None:
        raise ValueError(f"num_groups is {num_groups} and groups is given too: use groups alone")
    chosen = num_groups if groups is None else groups
    if isinstance(chosen, int):
        if chosen < 0:
            raise ValueError(f"groups should be at least 0 and is {chosen}")
        return min(chosen, len(slots))  # more groups than parameters would be empty
    index_of = {id(slot.param): slot.index for slot in slots}
    seen: set[int] = set()
    parsed = []
    if not isinstance(chosen, list | tuple):
        raise ValueError(f"groups should be a number or a list of lists of parameters and is {type(chosen).__name__}")
    for number, group in enumerate(chosen):
        if not isinstance(group, list | tuple) or not all(isinstance(item, torch.Tensor) for item in group):
            raise ValueError(f"groups should be a number or a list of lists of parameters; entry {number} is {group!r}")
        for item in group:
            if id(item) not in index_of:
                raise ValueError(
                    f"groups[{number}] holds a tensor of shape {tuple(item.shape)} that is no parameter of the optimizer"
                )
            if index_of[id(item)] in seen:
                raise ValueError(f"parameter {slots[index_of[id(item)]].name!r} is in groups twice; once is allowed")
            seen.add(index_of[id(item)])
        parsed.append(tuple(index_of[id(item)] for item in group))
    return tuple(group for group in parsed if group)
