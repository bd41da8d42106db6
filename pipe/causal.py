"""Stages of causal models of transformers: the model itself with some of its blocks.

What it does around its blocks, such as rotary embeddings and masks, stays its own code. Stages behind the first are given
hidden states as ``inputs_embeds``, those before the last return them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["CausalStage", "blocks_of", "is_causal_model"]


class _Names(NamedTuple):
    """The names of a model's parts in its ``base_model``."""

    embeddings: str
    positions: str | None  # that are added to embeddings
    blocks: str
    norm: str


#: By `model_type`.
_FAMILIES = {
    "gpt2": _Names("wte", "wpe", "h", "ln_f"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _Names("embed_tokens", None, "layers", "norm")),
}


def is_causal_model(module: torch.nn.Module) -> bool:
    """Whether `module` is of transformers, and has a head over words."""
    return hasattr(module, "base_model") and hasattr(module, "config") and hasattr(module, "lm_head")


def blocks_of(model: Any) -> Sequence[torch.nn.Module]:
    """The blocks of `model`, in order. Raises ``NotImplementedError`` for a family that is not known."""
    names = _FAMILIES.get(model.config.model_type)
    if names is None:
        raise NotImplementedError(
            f"a {model.config.model_type} model: {', '.join(sorted(_FAMILIES))} of transformers can be cut; make an "
            "nn.Sequential of the layers of others"
        )
    return list(getattr(model.base_model, names.blocks))


class _Nothing(torch.nn.Module):
    """Adds nothing where positions would be added."""

    def forward(self, *_args: Any, **_named: Any) -> torch.Tensor:
        return torch.zeros(())


class CausalStage(torch.nn.Module):
    """The blocks from `start` to `stop` of `model`, whose layers it shares: other stages have its other blocks.

    The first stage takes the numbers of words, (rows, length), and the last one returns logits.
    """

    def __init__(self, model: Any, start: int, stop: int) -> None:
        super().__init__()
        names, blocks = _FAMILIES[model.config.model_type], blocks_of(model)
        base = copy.copy(model.base_model)
        base._modules = dict(base._modules)
        self.first, self.last = start == 0, stop == len(blocks)
        self._prefix, self._blocks, self._start = model.base_model_prefix, names.blocks, start
        setattr(base, names.blocks, torch.nn.ModuleList(blocks[start:stop]))
        if not self.first:
            setattr(base, names.embeddings, torch.nn.Identity())
            if names.positions is not None:
                setattr(base, names.positions, _Nothing())
            for name, part in list(base.named_children()):
                if isinstance(part, torch.nn.Dropout):
                    setattr(base, name, torch.nn.Identity())
        if not self.last:
            setattr(base, names.norm, torch.nn.Identity())
        self.base = base
        if self.last:
            self.head = model.lm_head

    def name_in_whole(self, name: str) -> str:
        """What `model` calls what is `name` here."""
        part, _, rest = name.partition(".")
        if part == "head":
            return f"lm_head.{rest}"
        if rest.startswith(f"{self._blocks}."):
            _, number, inside = rest.split(".", 2)
            rest = f"{self._blocks}.{self._start + int(number)}.{inside}"
        return f"{self._prefix}.{rest}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        hidden = self.base(**given, use_cache=False, return_dict=True).last_hidden_state
        found: torch.Tensor = self.head(hidden) if self.last else hidden
        return found
