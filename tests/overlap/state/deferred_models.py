"""Models that construct themselves in many ways."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["MODELS", "TRANSFORMERS"]


def _layers() -> nn.Module:
    return nn.ModuleList(
        [
            *(nn.Linear(5, 7), nn.Bilinear(3, 4, 5), nn.Embedding(11, 6, padding_idx=2), nn.EmbeddingBag(9, 4)),
            *(nn.Conv1d(2, 4, 3), nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(4, 2, 3), nn.Conv3d(1, 2, 2)),
            *(
                nn.BatchNorm2d(4),
                nn.LayerNorm(6),
                nn.GroupNorm(2, 4),
                nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
            ),
            *(nn.LSTM(4, 5, 2, bidirectional=True), nn.GRU(3, 4), nn.RNNCell(2, 3), nn.PReLU(4)),
            *(
                nn.MultiheadAttention(8, 2),
                nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
                nn.RMSNorm(6),
            ),
            nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]),
        ]
    )


def _transformer() -> nn.Module:
    return nn.Transformer(16, 2, 2, 2, 32)


def _initializers() -> nn.Module:
    model = nn.Module()
    makers: dict[str, Callable[[torch.Tensor], Any]] = {
        "uniform": nn.init.uniform_,
        "normal": nn.init.normal_,
        "trunc_normal": nn.init.trunc_normal_,
        "constant": lambda tensor: nn.init.constant_(tensor, 0.25),
        "eye": nn.init.eye_,
        "xavier_uniform": nn.init.xavier_uniform_,
        "xavier_normal": nn.init.xavier_normal_,
        "kaiming_uniform": lambda tensor: nn.init.kaiming_uniform_(tensor, a=math.sqrt(5)),
        "kaiming_normal": lambda tensor: nn.init.kaiming_normal_(tensor, mode="fan_out", nonlinearity="relu"),
        "orthogonal": nn.init.orthogonal_,
        "sparse": lambda tensor: nn.init.sparse_(tensor, 0.3),
        "cauchy": lambda tensor: tensor.data.cauchy_(),
        "exponential": lambda tensor: tensor.data.exponential_(),
        "bernoulli": lambda tensor: tensor.data.bernoulli_(0.3),
    }
    for name, make in makers.items():
        parameter = nn.Parameter(torch.empty(6, 9))
        make(parameter)
        model.register_parameter(name, parameter)
    model.dirac = nn.Parameter(nn.init.dirac_(torch.empty(4, 4, 3)))
    return model


def _initialize(module: nn.Module) -> None:
    """As scripts have it: through ``.data``, over other values, and in rows."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(mean=0.0, std=0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()


def _applied() -> nn.Module:
    model = nn.Sequential(
        nn.Embedding(10, 6, padding_idx=1), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6, bias=False)
    )
    model.apply(_initialize)
    for name, parameter in model.named_parameters():
        if name.startswith("3"):
            with torch.no_grad():
                parameter.mul_(1 / math.sqrt(4)).clamp_(-0.02, 0.02)
    return model


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10))
    model[2].weight = model[0].weight
    model[1].weight.data = model[0].weight.data[:6]
    return model


def _flat() -> nn.Module:
    """Parameters that are views of one tensor, one of them transposed."""
    model, flat = nn.Module(), torch.randn(24)
    model.first = nn.Parameter(flat[:12].view(3, 4))
    model.second = nn.Parameter(flat[12:].view(3, 4).t())
    flat[5:15] *= 2
    return model


def _copies() -> nn.Module:
    layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = nn.ModuleList([copy.deepcopy(layer) for _ in range(3)])
    nn.init.zeros_(layer[0].weight)
    model[1].load_state_dict(model[0].state_dict())
    model.append(layer)
    return copy.deepcopy(model)


def _buffers() -> nn.Module:
    model = nn.Module()
    inverse = 1.0 / (10000.0 ** (torch.arange(0, 8, 2, dtype=torch.int64).float() / 8))
    model.register_buffer("inverse", inverse, persistent=False)
    angles = torch.outer(torch.arange(16), inverse)
    model.register_buffer("cosine", torch.cat((angles, angles), dim=-1).cos().to(torch.bfloat16))
    model.register_buffer("positions", torch.arange(16).expand((1, -1)))
    model.register_buffer("mask", torch.tril(torch.ones(6, 6, dtype=torch.bool)).view(1, 1, 6, 6))
    model.register_buffer("filled", torch.full((3, 3), float("-inf")).triu(1))
    model.register_buffer("listed", torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * torch.arange(2))
    model.register_buffer("window", torch.hann_window(8))
    model.register_buffer("order", torch.randperm(12))
    model.register_buffer("drawn", torch.randint(0, 9, (4,)))
    model.register_buffer("counted", torch.poisson(torch.rand(20) * 10))
    model.register_buffer("chosen", torch.multinomial(torch.rand(10), 3))
    model.register_buffer("dropped", nn.functional.dropout(torch.ones(32), 0.5))
    model.register_buffer("nonzero", torch.nonzero(model.mask))
    model.register_buffer("likewise", torch.randn_like(model.filled, dtype=torch.float64))
    model.register_buffer("with_device", torch.rand(4, device=model.filled.device))
    model.register_buffer("like_another", torch.tensor([1, 2]).to(model.filled))
    return model


def _from_data() -> nn.Module:
    model = nn.Module()
    model.listed = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    model.array = nn.Parameter(torch.from_numpy(np.arange(6, dtype=np.float32)))
    model.copied = nn.Parameter(torch.empty(6))
    model.copied.data.copy_(torch.from_numpy(np.arange(6, dtype=np.float32)))
    model.replaced = nn.Parameter(torch.empty(3))
    model.replaced.data = torch.tensor([4.0, 5.0, 6.0])
    model.filled = nn.Parameter(torch.tensor([0.0, 0.0]))
    model.filled.data = torch.randn(2)
    model.mixed = nn.Parameter(torch.ones(3, device="cpu") + torch.randn(3))
    table = np.sin(np.arange(12).reshape(3, 4))
    model.table = nn.Parameter(torch.empty(3, 4), requires_grad=False)
    model.table[:, 0:2] = torch.FloatTensor(table[:, 0::2])
    model.table[:, 2:] = torch.FloatTensor(table[:, 1::2])
    return model


def _constructors_of_old() -> nn.Module:
    model = nn.Module()
    model.first = nn.Parameter(torch.Tensor(3, 4))
    model.second = nn.Parameter(torch.FloatTensor(4))
    model.third = nn.Parameter(torch.Tensor([1.0, 2.0]))
    nn.init.kaiming_uniform_(model.first, a=math.sqrt(5))
    model.second.data.uniform_(-1, 1)
    return model


def _by_value() -> nn.Module:
    """What is constructed depends on values."""
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
    model = nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(4, 4))
    while model[-1].weight.abs().max() > 0.49:
        nn.init.normal_(model[-1].weight, std=0.2)
    model.append(nn.Linear(int(torch.tensor(4)), int((torch.arange(3) * 2).sum())))
    return model


def _seeded() -> nn.Module:
    first = nn.Linear(3, 3)
    torch.manual_seed(11)
    second = nn.Linear(3, 3)
    with torch.random.fork_rng():
        third = nn.Linear(3, 3)
    state = torch.get_rng_state()
    fourth = nn.Linear(3, 3)
    torch.set_rng_state(state)
    return nn.Sequential(first, second, third, fourth, nn.Linear(3, 3), nn.Dropout(torch.rand(()).item()))


def _skipped() -> nn.Module:
    layer = nn.utils.skip_init(nn.Linear, 3, 4)
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    other = nn.Linear(3, 4, device="meta").to_empty(device="cpu")
    other.reset_parameters()
    return nn.Sequential(layer, other, nn.Linear(3, 4, device="cpu"))


def _converted() -> nn.Module:
    return nn.Sequential(
        *(_applied().half(), _layers().to(torch.bfloat16), _tied().double(), _transformer().to("cpu", torch.float16)),
        *(
            _applied().to("cpu"),
            nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            nn.Linear(2, 2).requires_grad_(False),
        ),
        *(nn.Linear(3, 2, dtype=torch.float64), nn.Linear(2, 3, dtype=torch.complex64)),
    )


def _lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    model(torch.zeros(2, 3))
    return model


def _normalized() -> nn.Module:
    made = [
        *(
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
        ),
        *(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), nn.utils.weight_norm(nn.Linear(3, 4))),
        nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)),
    ]
    nn.utils.parametrizations.orthogonal(nn.Linear(5, 3))
    return nn.Sequential(*made)


MODELS: dict[str, Callable[[], nn.Module]] = {
    make.__name__.lstrip("_"): make
    for make in (
        *(
            _layers,
            _transformer,
            _initializers,
            _applied,
            _tied,
            _flat,
            _copies,
            _buffers,
            _from_data,
            _constructors_of_old,
        ),
        *(_by_value, _seeded, _skipped, _converted, _lazy, _normalized),
    )
}


def _causal(kind: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    if kind == "GPT2Config":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    dtype = options.pop("dtype", torch.float32)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = getattr(transformers, kind)(**sizes, **ends, **options)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def _encoder(kind: str) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64
    )
    return getattr(transformers, f"{kind}Model")(config)


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: _causal("GPT2Config"),
    "llama": lambda: _causal("LlamaConfig", intermediate_size=64, tie_word_embeddings=False),
    "llama_tied": lambda: _causal("LlamaConfig", intermediate_size=64, tie_word_embeddings=True),
    "llama_bfloat16": lambda: _causal("LlamaConfig", intermediate_size=64, dtype=torch.bfloat16),
    "mixtral": lambda: _causal("MixtralConfig", intermediate_size=64, num_key_value_heads=2, num_local_experts=4),
    "bert": lambda: _encoder("Bert"),
    "deberta": lambda: _encoder("DebertaV2"),
}
