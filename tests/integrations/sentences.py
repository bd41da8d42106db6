"""A small GPT-2 in fp64 and what it reads: made here, the same on every rank."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["WORDS", "IteratedSentences", "collate", "gpt2", "sentences"]

WORDS = 40


def gpt2(**options: Any) -> torch.nn.Module:
    """Two layers, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    quiet: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    shape: dict[str, Any] = {"vocab_size": WORDS, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config: Any = GPT2Config(**shape, **quiet, **ends, **options)
    made: torch.nn.Module = GPT2LMHeadModel(config).double()
    return made


def sentences(count: int, *, even: bool = True) -> list[dict[str, torch.Tensor]]:
    """Of 12 words, or of 4 to 12; the first third of the others' words is no target."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for number in range(count):
        words = torch.randint(WORDS, (12 if even else 4 + number % 9,), generator=generator)
        labels = words.clone()
        if not even:
            labels[: len(words) // 3] = -100
        found.append({"input_ids": words, "labels": labels})
    return found


class IteratedSentences(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Without a length."""

    def __init__(self, count: int) -> None:
        self._sentences = sentences(count)

    def __iter__(self) -> Any:
        return iter(self._sentences)


def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All of 12 words, so that losses do not depend on who is beside whom."""
    batch = {}
    for name, filler in (("input_ids", 0), ("labels", -100)):
        rows = [torch.nn.functional.pad(row[name], (0, 12 - len(row[name])), value=filler) for row in examples]
        batch[name] = torch.stack(rows)
    mask = [torch.arange(12) < len(row["input_ids"]) for row in examples]
    return {**batch, "attention_mask": torch.stack(mask).long()}
