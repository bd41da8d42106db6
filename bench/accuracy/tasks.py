"""Small tasks of real learning: handwritten digits, and the next byte of a text with a GPT-2.

`digits`, `narrow` and `gpt2`, which learns this project's own text, compare methods with equal results step by step.
`cnn` and `language` hold a part of their data out, for methods whose results are others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.program import ROOT

__all__ = ["TASKS", "WORDS", "Task", "text", "warm_up_and_cosine"]

WORDS = 64  # bytes that the GPT-2 sees at once
_SEEN = 0.8  # of the data, where the rest is held out
_EVALUATED = 512  # pieces of text at most
_WARM_UP = 0.1  # of the steps
_LAST = 0.1  # of the learning rate is left at the end

LossOf = Callable[[nn.Module, torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model, what makes its loss (of a batch that a generator picks), and the optimizer that suits both.

    `rates`: the learning rates among which each method's is searched, where that is asked for.
    `schedule`: of a step and how many there are, the part of the learning rate that the step takes; None: all of it.
    `held_out`: by name, what a trained model is worth on data that it has not seen.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[], LossOf]
    optimizer: Callable[..., torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    rates: tuple[float, ...]
    held_out: Callable[[nn.Module], dict[str, float]] | None = None
    schedule: Callable[[int, int], float] | None = None


def warm_up_and_cosine(step: int, steps: int) -> float:
    """A learning-rate factor that rises linearly and falls by half a cosine (Loshchilov & Hutter, ICLR 2017).

    Without it, a GPT-2 leaves its first plateau by chance, and seeds are farther apart than methods.
    """
    warm_up = max(1, round(_WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * done)) / 2


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def _narrow() -> nn.Module:
    """Twelve layers of 32: what a step takes besides its computation shows."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), *layers, nn.Linear(32, 10))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def _pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """All of scikit-learn's digits, in an order of chance that is always the same."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]


def _seen_digits() -> LossOf:
    images, labels = _pictures()
    return _of_digits(images[: int(_SEEN * len(labels))], labels[: int(_SEEN * len(labels))])


def _held_out_digits(model: nn.Module) -> dict[str, float]:
    images, labels = _pictures()
    images, labels = images[int(_SEEN * len(labels)) :], labels[int(_SEEN * len(labels)) :]
    scores = model(images)
    right = (scores.argmax(1) == labels).double().mean()
    return {"loss": nn.functional.cross_entropy(scores, labels).item(), "accuracy": right.item()}


def _digits() -> LossOf:
    from sklearn.datasets import load_digits

    data = load_digits()
    return _of_digits(torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target))


def _of_digits(images: torch.Tensor, labels: torch.Tensor) -> LossOf:
    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        chosen = torch.randint(len(labels), (32,), generator=generator)
        return nn.functional.cross_entropy(model(images[chosen]), labels[chosen])

    return loss


def _small_gpt2(width: int = 256) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": None,
        "vocab_size": 128,
        "n_positions": WORDS,
        "n_embd": width,
        "n_layer": 4,
        "n_head": 4,
    }
    config: Any = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shape)
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def _smaller_gpt2() -> nn.Module:
    """2.1 million parameters: many methods learn with it, with many seeds."""
    return _small_gpt2(208)


def text() -> torch.Tensor:
    """This project's own pages and sources, a number below 128 for each byte."""
    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("overlap/**/*.py"), *ROOT.glob("*.md")])
    everything = b"\n".join(file.read_bytes() for file in files)
    return torch.tensor([byte for byte in everything if byte < 128])


def manual() -> torch.Tensor:
    """The language reference that comes with Python, a number below 128 for each byte."""
    from pydoc_data.topics import topics

    everything = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.tensor([byte for byte in everything if byte < 128])


def _seen_words() -> LossOf:
    words = manual()
    return _of_words(words[: int(_SEEN * len(words))], pieces=4)


def _held_out_words(model: nn.Module) -> dict[str, float]:
    words = manual()
    words = words[int(_SEEN * len(words)) :]
    starts = range(0, len(words) - WORDS - 1, max(WORDS, (len(words) - WORDS) // _EVALUATED))
    pieces = torch.stack([words[start : start + WORDS + 1] for start in starts])
    scores = model(pieces[:, :-1]).logits
    return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten()).item()}


def _next_byte() -> LossOf:
    return _of_words(text())


def _of_words(words: torch.Tensor, pieces: int = 8) -> LossOf:
    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        starts = torch.randint(len(words) - WORDS - 1, (pieces,), generator=generator)
        piece = torch.stack([words[start : start + WORDS + 1] for start in starts.tolist()])
        scores = model(piece[:, :-1]).logits
        return nn.functional.cross_entropy(scores.flatten(0, 1), piece[:, 1:].flatten())

    return loss


_SGD, _ADAMW = (0.005, 0.015, 0.05, 0.15, 0.5), (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
TASKS = {
    "digits": Task(_perceptron, _digits, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, _SGD),
    "narrow": Task(_narrow, _digits, torch.optim.SGD, {"lr": 0.05}, _SGD),
    "gpt2": Task(_small_gpt2, _next_byte, torch.optim.AdamW, {"lr": 1e-3}, _ADAMW),
    "cnn": Task(_convolutions, _seen_digits, torch.optim.AdamW, {"lr": 1e-3}, _ADAMW, _held_out_digits),
    "language": Task(
        _smaller_gpt2, _seen_words, torch.optim.AdamW, {"lr": 1e-3}, _ADAMW, _held_out_words, warm_up_and_cosine
    ),
}
