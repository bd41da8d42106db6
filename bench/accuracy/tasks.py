"""Two small things to learn for real: handwritten digits, and the next byte of this project's own text with a GPT-2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.program import ROOT

__all__ = ["TASKS", "WORDS", "Task", "text"]

WORDS = 64  # bytes that the GPT-2 sees at once


@dataclass(frozen=True)
class Task:
    """A model, what makes its loss (of a batch that a generator picks), and the optimizer that suits both."""

    build: Callable[[], nn.Module]
    loss: Callable[[], Callable[[nn.Module, torch.Generator], torch.Tensor]]
    optimizer: Callable[..., torch.optim.Optimizer]
    arguments: Mapping[str, Any]


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def _digits() -> Callable[[nn.Module, torch.Generator], torch.Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)

    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        chosen = torch.randint(len(labels), (32,), generator=generator)
        return nn.functional.cross_entropy(model(images[chosen]), labels[chosen])

    return loss


def _small_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": None,
        "vocab_size": 128,
        "n_positions": WORDS,
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 4,
    }
    config: Any = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shape)
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def text() -> torch.Tensor:
    """This project's own pages and sources, a number below 128 for each byte."""
    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("overlap/**/*.py"), *ROOT.glob("*.md")])
    everything = b"\n".join(file.read_bytes() for file in files)
    return torch.tensor([byte for byte in everything if byte < 128])


def _next_byte() -> Callable[[nn.Module, torch.Generator], torch.Tensor]:
    words = text()

    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        starts = torch.randint(len(words) - WORDS - 1, (8,), generator=generator)
        piece = torch.stack([words[start : start + WORDS + 1] for start in starts.tolist()])
        scores = model(piece[:, :-1]).logits
        return nn.functional.cross_entropy(scores.flatten(0, 1), piece[:, 1:].flatten())

    return loss


TASKS = {
    "digits": Task(_perceptron, _digits, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "gpt2": Task(_small_gpt2, _next_byte, torch.optim.AdamW, {"lr": 1e-3}),
}
