"""The models that can be trained, each with its synthetic batch, loss and learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from bench.models import language, mlp
from bench.models.densenet import DENSENETS
from bench.models.inception import googlenet, inception_v3, inceptionv4
from bench.models.resnet import RESNETS
from bench.models.vgg import VGGS, alexnet

__all__ = ["MODELS", "Workload", "workload"]

Batch = tuple[torch.Tensor, ...]
CLASSES = 1000
LARGEST_ID = 2000  # of the synthetic words


@dataclass(frozen=True)
class Workload:
    """A model and what is fed to it.

    ``batch(n, size, generator)`` is `n` samples of `size` (edge of a picture, or words); ``loss(model, batch)`` is a
    scalar. The parameters are the same at every size: ``small`` makes the computation cheap, not the communication.
    """

    name: str
    unit: str  # what one sample is called: img or sen
    build: Callable[[], nn.Module]
    batch: Callable[[int, int, torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    size: int
    small: int
    batch_size: int
    learning_rate: float = 0.01


def _pictures(number: int, size: int, generator: torch.Generator) -> Batch:
    pictures = torch.randn(number, 3, size, size, generator=generator)
    return pictures, torch.randint(CLASSES, (number,), generator=generator)


def _vectors(number: int, size: int, generator: torch.Generator) -> Batch:
    vectors = torch.randn(number, size, generator=generator)
    return vectors, torch.randint(size, (number,), generator=generator)


def _masked_sentences(number: int, size: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(LARGEST_ID, (number, size), generator=generator)
    labels = torch.where(
        torch.rand(ids.shape, generator=generator) < 0.15, ids, -100
    )  # 15 % of the words are asked for
    labels[:, 0] = ids[:, 0]
    return ids, labels, torch.randint(2, (number,), generator=generator)


def _sentences(number: int, size: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(LARGEST_ID, (number, size), generator=generator)
    return ids, ids


def _cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss


def _of_pictures(
    name: str, build: Callable[[], nn.Module], *, batch_size: int = 64, size: int = 224, small: int = 64
) -> Workload:
    return Workload(name, "img", build, _pictures, _cross_entropy, size, small, batch_size)


MODELS = {
    model.name: model
    for model in (
        *(_of_pictures(name, build) for name, build in RESNETS.items()),
        *(_of_pictures(name, build, batch_size=32) for name, build in DENSENETS.items()),
        _of_pictures("googlenet", googlenet),
        _of_pictures("inception_v3", inception_v3, size=227, small=96),  # DeAR's benchmark takes 227, the paper 299
        _of_pictures("inceptionv4", inceptionv4, small=96),
        *(_of_pictures(name, build, batch_size=32) for name, build in VGGS.items()),
        _of_pictures("alexnet", alexnet),
        *(
            Workload(name, "sen", partial(language.bert, shape), _masked_sentences, _own_loss, 64, 16, size, 2e-5)
            for name, shape, size in (("bert_small", "small", 64), ("bert_base", "base", 64), ("bert", "large", 32))
        ),
        Workload("gpt2", "sen", language.gpt2, _sentences, _own_loss, 128, 16, 8, 2e-5),
        Workload("mlp", "img", mlp.mlp, _vectors, _cross_entropy, mlp.WIDTH, mlp.WIDTH, 32),
        Workload("narrow_mlp", "img", mlp.narrow_mlp, _vectors, _cross_entropy, mlp.NARROW, mlp.NARROW, 32),
        Workload("wide_mlp", "img", mlp.wide_mlp, _vectors, _cross_entropy, mlp.WIDE, mlp.WIDE, 32),
        Workload("uneven_mlp", "img", mlp.uneven_mlp, _vectors, _cross_entropy, mlp.WIDTH, mlp.WIDTH, 32),
    )
}


def workload(name: str) -> Workload:
    """The workload of this name; raises ``ValueError``, with the known names, for another one."""
    if name not in MODELS:
        raise ValueError(f"the model should be one of {', '.join(MODELS)} and is {name!r}")
    return MODELS[name]
