"""CUDA graphs of a model's parts, where parameters move into buckets or become ready after ``step()``.

A replay reads parameters where they lay when the graph was captured, and passes no gate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap.core.gates.holders import holders

__all__ = ["graphed_module", "refuse_capture_of_gate", "refuse_graphed_module"]

_REMEDY = (
    "Take strategy='wfbp' or 'mgwfbp', whose parameters stay where they are and are final when step() returns, and capture "
    "before the optimizer is wrapped"
)


def graphed_module(model: torch.nn.Module | None, parameters: Sequence[torch.Tensor]) -> str | None:
    """The name of a module around some of `parameters` that ``torch.cuda.make_graphed_callables`` has made a graph of.

    Looks at all modules of `model`, or, without one, of this process. A graph of a plain function is not found.
    """
    named = model.named_modules() if model is not None else ((type(one).__name__, one) for one in holders(parameters))
    for name, module in named:
        if getattr(vars(module).get("forward"), "__module__", "") == torch.cuda.graphs.__name__:
            return name or "the model itself"
    return None


def refuse_graphed_module(name: str, strategy: str) -> str:
    """A message for the user whose module `name` is a graph already."""
    return (
        f"module {name!r} is a CUDA graph (torch.cuda.make_graphed_callables), which reads parameters where they lay when "
        f"it was captured and waits for none; strategy {strategy!r} moves them into buckets, or makes them ready after "
        f"step(). {_REMEDY}"
    )


def refuse_capture_of_gate(strategy: str) -> str:
    """A message for the user who captures a module whose parameters have gates."""
    return (
        "this stream is being captured into a CUDA graph, whose replays would not wait for parameters that strategy "
        f"{strategy!r} makes ready after step(). {_REMEDY}; or capture a copy of the model (copy.deepcopy)"
    )
