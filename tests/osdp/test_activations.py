"""Blocks that backward computes again, without training: what transformers' layers declare."""

from __future__ import annotations

import pytest
import torch

from osdp.activations import Blocks


def test_layers_of_transformers_declare_it() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers.models.llama.modeling_llama.LlamaDecoderLayer, "gradient_checkpointing"):
        pytest.skip("layers of this version do not")
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=67
    )
    model = transformers.LlamaForCausalLM(config).train()
    tokens = torch.randint(67, (2, 9))
    blocks = Blocks(model)
    assert blocks.names == tuple(f"model.layers.{number}" for number in range(4))
    assert Blocks(model, False).names == ()
    blocks.measure()
    model(input_ids=tokens, labels=tokens).loss.backward()
    saved = blocks.measured(1)
    blocks.stop()
    assert min(nbytes or 0 for nbytes in saved.values()) > 10 * 2 * 9 * 32 * 4
    assert len(set(saved.values())) == 1, "they are alike"
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    runs: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, number=number: runs.append(number))
    blocks.switch(("model.layers.1", "model.layers.2"))
    model(input_ids=tokens, labels=tokens).loss.backward()  # with a cache, which no layer may write to twice
    assert runs == [0, 1, 2, 3, 2, 1]
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    blocks.end()
    runs.clear()
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert runs == [0, 1, 2, 3]
    model.gradient_checkpointing_enable()
    assert Blocks(model).names == (), "the script has it done"
