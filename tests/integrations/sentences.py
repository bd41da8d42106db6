"""A small GPT-2, others in fp64, and what they read: made here, the same on every rank."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["WORDS", "IteratedSentences", "collate", "gpt2", "llama", "sentences", "t5"]

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


def llama() -> torch.nn.Module:
    """Two layers whose head has a weight of its own, and whose projections have no bias."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    made: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**shape, **heads, **ends)).double()
    return made


def t5() -> torch.nn.Module:
    """An encoder and a decoder over one embedding, with word 3 at the end of what is generated."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    shape: dict[str, Any] = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    ends: dict[str, Any] = {"decoder_start_token_id": 0, "eos_token_id": 3, "pad_token_id": 0}
    made: torch.nn.Module = T5ForConditionalGeneration(T5Config(**shape, **ends, dropout_rate=0.0)).double()
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
