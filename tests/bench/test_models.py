"""The benchmark's models are the ones their names promise, and every one learns from its synthetic batch."""

from __future__ import annotations

import pytest
import torch

from bench.models.catalog import MODELS, workload

# Parameters, and the tensors they come in, as published.
PUBLISHED = {
    "resnet50": (25_557_032, 161),
    "densenet201": (20_013_928, 604),
    "inceptionv4": (42_679_816, 449),
    "vgg16": (138_357_544, 32),
    # Six words more than the published 30,522: their vectors, and their biases in the head.
    "bert_base": (110_106_428 + 6 * 769, 206),
    "bert": (336_226_108 + 6 * 1025, 398),
    "gpt2": (124_439_808, 148),
    "mlp": (25_050_000, 200),
    "narrow_mlp": (1_664_000, 800),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_published(name: str) -> None:
    with torch.device("meta"):
        parameters = list(workload(name).build().parameters())
    assert (sum(p.numel() for p in parameters), len(parameters)) == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])  # its mask is looked at: not on meta
def test_a_small_batch_passes_through_and_reaches_every_parameter(name: str) -> None:
    if name.startswith("bert"):
        pytest.importorskip("transformers", minversion="5", reason="before, BERT's mask is looked at, too")
    chosen = workload(name)
    device = torch.device("meta")
    with device:
        model = chosen.build()
    batch = tuple(part.to(device) for part in chosen.batch(2, chosen.small, torch.Generator().manual_seed(1)))
    loss = chosen.loss(model, batch)
    assert loss.shape == ()
    loss.backward()  # type: ignore[no-untyped-call]
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_batches_repeat_with_their_seed() -> None:
    for chosen in MODELS.values():
        twice = [chosen.batch(2, chosen.small, torch.Generator().manual_seed(7)) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))


def test_an_unknown_model_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"one of resnet50, .* and is 'alexnet'"):
        workload("alexnet")
