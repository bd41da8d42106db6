"""Divides the layers of a model that exists, by a plan as torch or transformers has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from model_parallel.initialize import tensor_axis
from model_parallel.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    divided,
)

__all__ = ["parallelize"]

#: transformers' words, in its models' `_tp_plan`.
_STYLES: Mapping[str, Callable[[], Any]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def parallelize(module: torch.nn.Module, plan: Mapping[str, Any] | None = None) -> torch.nn.Module:
    """Divide layers of `module` among the ranks of the tensor axis, in place; returns it. On every rank of it.

    `plan` gives names of modules, in which ``*`` stands for one part of a name, a style:
    ``torch.distributed.tensor.parallel.ColwiseParallel()`` or ``RowwiseParallel()``, with their `input_layouts` and
    `output_layouts`, or transformers' words for these. None is the plan that a model of transformers brings
    (``model._tp_plan``). ``nn.Linear`` and ``nn.Embedding`` can be divided. Values are those of the first rank of the axis.
    Make the optimizer afterwards: divided layers have parameters of their own.

    Raises ``ValueError`` for names that match nothing, ``NotImplementedError`` for other modules, styles and layouts, and
    where a weight is shared with a module that is divided in another way.
    """
    rules = dict(plan) if plan is not None else _own_plan(module)
    axis = tensor_axis()
    chosen: dict[str, Any] = {}
    for pattern, style in rules.items():
        named = [name for name, _ in module.named_modules() if _matches(name, pattern)]
        if not named:
            raise ValueError(f"no module of {type(module).__name__} is named {pattern!r}")
        chosen.update(dict.fromkeys(named, style))
    made = {name: _layer(name, module.get_submodule(name), style) for name, style in chosen.items()}
    _keep_ties(module, made)
    if axis.size > 1:
        for name, layer in made.items():
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, layer)
    return module


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _own_plan(module: torch.nn.Module) -> dict[str, Any]:
    found: Mapping[str, Any] | None = getattr(module, "_tp_plan", None)
    if not found:
        raise ValueError(f"{type(module).__name__} has no plan of its own (_tp_plan): give one")
    names = [name for name, _ in module.named_modules()]
    return {
        pattern: style for pattern, style in found.items() if any(_matches(name, pattern) for name in names)
    }  # a class may name layers that only some of its models have


def _layer(name: str, layer: torch.nn.Module, style: Any) -> torch.nn.Module:
    if isinstance(style, str):
        if style not in _STYLES:
            raise NotImplementedError(f"{name!r}: the style {style!r} is none of {', '.join(_STYLES)}")
        style = _STYLES[style]()
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        raise NotImplementedError(
            f"{name!r}: {type(style).__name__} is neither ColwiseParallel nor RowwiseParallel, which are built"
        )
    (given,), (wanted,) = style.input_layouts, style.output_layouts
    columns = isinstance(style, ColwiseParallel)
    if isinstance(layer, torch.nn.Embedding):
        if not isinstance(given, Replicate) or not isinstance(wanted, Replicate):
            raise NotImplementedError(f"{name!r}: an embedding takes and returns whole tensors: {given} to {wanted}")
        options = {
            key: getattr(layer, key)
            for key in (
                "num_embeddings",
                "embedding_dim",
                "padding_idx",
                "max_norm",
                "norm_type",
                "scale_grad_by_freq",
                "sparse",
            )
        }
        if columns and layer.max_norm is not None:
            raise NotImplementedError(f"{name!r}: max_norm needs whole rows: give RowwiseParallel")
        return divided(ParallelEmbedding if columns else VocabParallelEmbedding, layer, **options)
    if type(layer) is not torch.nn.Linear:
        raise NotImplementedError(f"{name!r} is a {type(layer).__name__}; nn.Linear and nn.Embedding can be divided")
    shape = {"in_features": layer.in_features, "out_features": layer.out_features}
    if columns:
        if not isinstance(given, Replicate) or not (isinstance(wanted, Replicate) or wanted == Shard(-1)):
            raise NotImplementedError(
                f"{name!r}: columns from {given} to {wanted}; from Replicate, to it or to Shard(-1)"
            )
        return divided(ColumnParallelLinear, layer, gather_output=isinstance(wanted, Replicate), **shape)
    if not isinstance(wanted, Replicate) or not (isinstance(given, Replicate) or given == Shard(-1)):
        raise NotImplementedError(f"{name!r}: rows from {given} to {wanted}; from Replicate or Shard(-1), to Replicate")
    return divided(RowParallelLinear, layer, input_is_parallel=not isinstance(given, Replicate), **shape)


def _keep_ties(module: torch.nn.Module, made: Mapping[str, torch.nn.Module]) -> None:
    """Let divided layers share what the whole ones have shared."""
    first: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for name, layer in made.items():
        for key, parameter in list(layer.named_parameters(recurse=False)):
            before = module.get_submodule(name).get_parameter(key)
            known = first.setdefault(id(before), (name, parameter))
            if known[1] is not parameter:
                if known[1].shape != parameter.shape:
                    raise NotImplementedError(
                        f"{known[0]!r} and {name!r} share a {key}, and are divided in two ways: divide both by rows of the "
                        "vocabulary, the embedding by RowwiseParallel and the head by ColwiseParallel"
                    )
                layer.register_parameter(key, known[1])
    for name, part in module.named_modules():
        for key, parameter in part.named_parameters(recurse=False):
            if name not in made and id(parameter) in first:
                raise NotImplementedError(
                    f"{name!r} has the {key} of {first[id(parameter)][0]!r}, which is divided: divide it, too"
                )
