"""A GPT-2-like decoder and a BERT-like encoder of any size, in plain PyTorch, and synthetic text that they can learn.

words    tied to the head, as in both papers
blocks   GPT-2 normalises before each part, BERT after it
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

MASKED = 0.15  # of a sentence's words, as in BERT
_IGNORED = -100  # by cross_entropy


class Shape(NamedTuple):
    """The sizes of a model. `words`: of a sentence, at most."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    words: int
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and an MLP, each added to its input: (N, words, hidden) to the same."""

    def __init__(self, shape: Shape, *, causal: bool) -> None:
        super().__init__()
        hidden, self.heads, self.causal, self.dropout = shape.hidden, shape.heads, causal, shape.dropout
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query_key_value, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.causal:
            x = x + self.drop(self._attention(self.first(x)))
            return x + self.drop(self.mlp(self.second(x)))
        x = self.first(x + self.drop(self._attention(x)))
        return self.second(x + self.drop(self.mlp(x)))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        split = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            *split, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
        )
        return self.out(attended.transpose(1, 2).flatten(-2))


class Transformer(nn.Module):
    """Ids (N, words) and labels of the same shape, -100 where none is asked for, to the mean loss over all labels."""

    def __init__(self, shape: Shape, *, causal: bool) -> None:
        super().__init__()
        self.words, self.places = (nn.Embedding(count, shape.hidden) for count in (shape.vocabulary, shape.words))
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, causal=causal) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.words(ids) + self.places(places))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)


def gpt(shape: Shape) -> Transformer:
    """A decoder: each word is predicted from those before it."""
    return Transformer(shape, causal=True)


def bert(shape: Shape) -> Transformer:
    """An encoder: masked words are predicted from all others."""
    return Transformer(shape, causal=False)


def sentences(count: int, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Ids (count, words): first words are often small, others follow by the sentence's own step. The last id is unused."""
    known = shape.vocabulary - 1
    first = (known * torch.rand(count, 1, generator=generator) ** 4).long()
    step = torch.randint(4, (count, 1), generator=generator)
    return (first + step * torch.arange(shape.words)) % known


def next_words(count: int, shape: Shape, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch for a decoder: sentences, and the next word of each place but the last."""
    ids = sentences(count, shape, generator)
    return ids, functional.pad(ids[:, 1:], (0, 1), value=_IGNORED)


def masked_words(count: int, shape: Shape, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch for an encoder: sentences with some words replaced by the last id, and what these were."""
    ids = sentences(count, shape, generator)
    hidden = torch.rand(ids.shape, generator=generator) < MASKED
    hidden[:, 0] = True  # no sentence is without
    return ids.masked_fill(hidden, shape.vocabulary - 1), ids.masked_fill(~hidden, _IGNORED)
