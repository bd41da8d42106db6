"""BERT with both pretraining heads, and GPT-2 small: built by transformers, not downloaded.

BERT-Base and -Large are those of Devlin et al. (NAACL 2019), BERT-Small is that of Turc et al. (arXiv 1908.08962).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["GPT2_VOCABULARY", "VOCABULARY", "Pretraining", "bert", "gpt2"]

VOCABULARY = 30528  # BERT's 30,522 words, made a multiple of 8
GPT2_VOCABULARY = 50257


class Pretraining(nn.Module):
    """A model of transformers whose forward takes tensors by position and returns the loss."""

    def __init__(self, model: nn.Module, arguments: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.arguments = model, arguments

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**dict(zip(self.arguments, tensors, strict=True))).loss
        return loss


_SHAPES = {"small": (4, 512, 8), "base": (12, 768, 12), "large": (24, 1024, 16)}  # layers, width, heads


def bert(shape: str) -> nn.Module:
    """BERT: ids and masked-word labels (N, words) and next-sentence labels (N,) to the sum of both losses."""
    from transformers import BertConfig, BertForPreTraining

    layers, width, heads = _SHAPES[shape]
    config = BertConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    return Pretraining(BertForPreTraining(config), ("input_ids", "labels", "next_sentence_label"))


def gpt2() -> nn.Module:
    """GPT-2: ids (N, words) to the mean loss of predicting each next word. 124,439,808 parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config: Any = GPT2Config(use_cache=False)
    config.loss_type = "ForCausalLM"
    return Pretraining(GPT2LMHeadModel(config), ("input_ids", "labels"))
