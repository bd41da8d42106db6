"""PEFT's adapters over a base that the ranks of a host share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dear
from overlap.job.memory.pages import in_pages
from tests.spmd.strategies import WRAP
from tests.spmd.training import assert_close
from tests.spmd_plugin import SIZE

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def test_adapters_of_peft() -> None:
    def make(seed: int) -> Any:
        torch.default_generator.manual_seed(seed)
        sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 48, "n_layer": 2, "n_head": 2}
        config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        wanted = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        return peft.get_peft_model(transformers.GPT2LMHeadModel(config), wanted).double()

    def loss(model: Any, step: int, rank: int) -> torch.Tensor:
        tokens = (torch.arange(12).view(2, 6) * (step + 2) + rank) % 61
        found: torch.Tensor = model(tokens, labels=tokens).loss
        return found

    model, alone = make(dear.rank()), make(0)
    optimizer = WRAP["fsdp"](torch.optim.AdamW(model.parameters(), 1e-2), model)
    plain = torch.optim.AdamW(alone.parameters(), 1e-2)
    for step in range(3):
        for each, ranks in ((optimizer, [dear.rank()]), (plain, range(SIZE))):
            each.zero_grad()
            one = model if each is optimizer else alone
            (sum(loss(one, step, rank) for rank in ranks) / len(ranks)).backward()
            each.step()
    assert_close(dict(model.state_dict()), dict(alone.state_dict()), "peft")
    assert all(
        in_pages(each) is (SIZE > 1) for each in model.parameters() if not each.requires_grad and each.nbytes >= 4096
    )
