"""Assigns parameters to fragments of the model by their names (pure, so the same on all ranks).

Fragments are of whole layers. Neighbours are in different ones, in turn: the paper (Douillard et al., arXiv 2501.18512,
section 3.1) calls that strided, and found it a little better than a cut into sequences. It takes 3 layers a fragment.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["fitting", "fragments_of", "layer_of", "layers_of"]

_LAYERS_IN_A_FRAGMENT = 3


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, a block of a list; else the module that has it.

    ``"h.3.attn.weight"`` is of ``"h.3"``, ``"embed.weight"`` of ``"embed"``.
    """
    words = name.split(".")
    for place, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: place + 1])
    return ".".join(words[:-1])


def layers_of(names: Sequence[str]) -> list[int]:
    """The number of each parameter's layer, counted as layers come. More names at the end change nothing before."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(layer_of(name), len(numbers)) for name in names]


def fragments_of(names: Sequence[str], fragments: int) -> list[int]:
    """The number of each parameter's fragment, below `fragments`."""
    return [layer % fragments for layer in layers_of(names)]


def fitting(names: Sequence[str], frequency: int, overlap: int) -> int:
    """The number of fragments of 3 layers, but no more than leave `overlap` of `frequency` steps between two."""
    layers = len(set(layers_of(names)))
    return max(1, min(-(-layers // _LAYERS_IN_A_FRAGMENT), frequency // max(overlap, 1)))
