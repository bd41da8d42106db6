"""Pipelines of models that share parameters between stages, and of transformers' own: as in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

import dear
import pipe

pytestmark = [pytest.mark.four_ranks, pytest.mark.usefixtures("sets_of_a_test")]

BALANCES = {1: [4], 2: [3, 1], 4: [1, 1, 1, 1]}


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _words(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(61, (rows, 9), generator=torch.Generator().manual_seed(step))
    return words[:, :-1], words[:, 1:]


def _tied() -> nn.Module:
    torch.manual_seed(5)
    embed, head = nn.Embedding(61, 8), nn.Linear(8, 61, bias=False)
    head.weight = embed.weight
    inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(embed, *inner[:2], nn.Sequential(inner[2], head)).double()


def _gpt2() -> nn.Module:
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        n_layer=4, n_embd=16, n_head=2, vocab_size=61, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).double().eval()  # without dropout
    return model


def _llama(*, tied: bool) -> nn.Module:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=61,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).double()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": _tied,
    "gpt2": _gpt2,
    "llama": lambda: _llama(tied=False),
    "llama-tied": lambda: _llama(tied=True),
}


def _logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "stages", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("strategy", ["dear", "wfbp", "fsdp"])
def test_training_equals_one_process(name: str, stages: int, strategy: str) -> None:
    if dear.size() % stages:
        pytest.skip("other numbers of ranks")
    mesh = dear.Mesh(data=-1, pipeline=stages)
    plain = MODELS[name]()
    piped = pipe.Pipe(MODELS[name](), BALANCES[stages], mesh=mesh, chunks=4, loss=_cross_entropy)
    theirs = torch.optim.AdamW(plain.parameters(), 0.01)
    ours = dear.DistributedOptimizer(
        torch.optim.AdamW(piped.parameters(), 0.01), piped, strategy=strategy, process_set=mesh.group("data")
    )
    count = 8 // mesh.size("data")
    mine = slice(mesh.coordinate["data"] * count, (mesh.coordinate["data"] + 1) * count)
    for step in range(4):
        x, y = _words(step)
        theirs.zero_grad()
        wanted = _cross_entropy(_logits(plain, x), y)
        wanted.backward()
        wanted_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        theirs.step()
        ours.zero_grad()
        found = piped.step(x[mine], target=y[mine])
        norm = torch.nn.utils.clip_grad_norm_(piped.parameters(), 0.2)
        torch.testing.assert_close(norm, wanted_norm, rtol=1e-8, atol=0)
        ours.step()
        total = dear.allreduce(found, process_set=mesh.group("data"))
        torch.testing.assert_close(total, wanted.detach(), rtol=1e-8, atol=0)
    with torch.no_grad():
        output = piped(_words(9)[0])
    if output is not None:
        torch.testing.assert_close(output, _logits(plain, _words(9)[0]).detach(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("strategy", ["dear", "fsdp"])
def test_gradients_of_a_tied_parameter_add_up_and_loaded_values_are_lent(strategy: str, rows: int) -> None:
    """Over two steps of the pipeline, also of one micro-batch, before the optimizer steps."""
    if dear.size() % 2:
        pytest.skip("other numbers of ranks")
    mesh = dear.Mesh(data=-1, pipeline=2)
    mine = mesh.coordinate["data"]
    plain, piped = _tied(), pipe.Pipe(_tied(), BALANCES[2], mesh=mesh, chunks=4, loss=_cross_entropy)
    theirs = torch.optim.SGD(plain.parameters(), 0.5, momentum=0.9)
    ours = dear.DistributedOptimizer(
        torch.optim.SGD(piped.parameters(), 0.5, momentum=0.9),
        piped,
        strategy=strategy,
        backward_passes_per_step=2 if strategy == "dear" else 1,  # under fsdp, they add up in shards
        process_set=mesh.group("data"),
    )
    for step in range(6):
        x, y = _words(step, rows * mesh.size("data"))
        _cross_entropy(plain(x), y).backward()
        piped.step(x.chunk(mesh.size("data"))[mine], target=y.chunk(mesh.size("data"))[mine])
        if step % 2 == 0:
            continue
        theirs.step()
        ours.step()
        theirs.zero_grad(set_to_none=step == 1)
        ours.zero_grad(set_to_none=step == 1)
        if step == 3:
            for model in (plain, piped):
                model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    saved = plain.state_dict()
    for name, value in piped.state_dict().items():
        torch.testing.assert_close(value, saved[name.split(".", 2)[2]], rtol=1e-9, atol=1e-12)


def test_a_model_of_an_unknown_family_is_named() -> None:
    config = transformers.GPTNeoConfig(
        num_layers=2, hidden_size=8, num_heads=2, attention_types=[[["global"], 2]], vocab_size=61
    )
    mesh = dear.Mesh(data=1, pipeline=-1)
    with pytest.raises(NotImplementedError, match="a gpt_neo model: gpt2, llama"):
        pipe.Pipe(transformers.GPTNeoForCausalLM(config), [2], mesh=mesh)
