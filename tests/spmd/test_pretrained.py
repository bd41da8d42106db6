"""Weights that Hugging Face loads, written and read where each rank has a share of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
from tests.spmd.models import double_model
from tests.spmd.strategies import OWNED
from tests.spmd.strategies import WRAP as WAYS
from tests.spmd.training import local_loss, trained, values_of
from tests.spmd_plugin import SIZE

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

WRAP = WAYS | OWNED
STRATEGIES = ("fsdp", "fsdp-owned", "dear")


def _gpt(seed: int = 3) -> Any:
    torch.default_generator.manual_seed(seed)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return transformers.GPT2LMHeadModel(config)


def _wrapped(strategy: str, seed: int = 3, steps: int = 2) -> tuple[Any, Any]:
    model = _gpt(seed)
    optimizer = WRAP[strategy](torch.optim.AdamW(model.parameters(), 1e-2), model)
    for step in range(steps):
        optimizer.zero_grad()
        tokens = torch.arange(12).view(2, 6) + 5 * step + dear.rank()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model, optimizer


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert value.dtype == other[name].dtype, name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("dtype", "max_shard_mb"), [(None, 5000), (torch.bfloat16, 0.01), (torch.float16, 5000)], ids=str
)
def test_from_pretrained_loads_it(strategy: str, dtype: Any, max_shard_mb: float, folder: Path) -> None:
    model, _optimizer = _wrapped(strategy)
    dear.save_pretrained(model, folder, dtype=dtype, max_shard_mb=max_shard_mb)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (len(files) > 3) if max_shard_mb < 1 else (files == ["model.safetensors"])
    assert (folder / "model.safetensors.index.json").exists() == (len(files) > 1)
    assert (folder / "generation_config.json").exists()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["dtype"] == {None: "float32"}.get(dtype, str(dtype).removeprefix("torch."))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert type(loaded).__name__ == "GPT2LMHeadModel"
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    expected = model.state_dict()
    _equal(loaded.state_dict(), {name: value.to(dtype or value.dtype) for name, value in expected.items()})
    saved = {name for file in files for name in safetensors.load_file(folder / file)}
    assert saved == set(expected) - {"lm_head.weight"}, "as Hugging Face has it"
    dear.barrier()  # before the folder goes


def test_the_names_are_those_of_hugging_face(folder: Path) -> None:
    for make in (
        _gpt,
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        ),
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
            )
        ),
    ):
        torch.default_generator.manual_seed(4)
        model: Any = make()
        if dear.rank() == 0:
            model.save_pretrained(folder / "theirs")
        _optimizer = WRAP["fsdp"](torch.optim.SGD(model.parameters(), 0.1), model)
        dear.save_pretrained(model, folder / "ours")
        one, other = (safetensors.load_file(folder / who / "model.safetensors") for who in ("ours", "theirs"))
        _equal(one, other)
        dear.barrier()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_shard_mb", [5000, 0.01])
def test_weights_are_loaded_into_shares(strategy: str, max_shard_mb: float, folder: Path) -> None:
    source = _gpt(9)
    if dear.rank() == 0:
        source.save_pretrained(folder, max_shard_size=int(max_shard_mb * 2**20))
    dear.barrier()
    model, optimizer = _wrapped(strategy)
    dear.load_pretrained(model, folder)
    _equal(dict(model.state_dict()), source.state_dict())
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens).logits, source(tokens).logits), "what was gathered ahead is gathered anew"
    optimizer.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    plain = _gpt(2)
    dear.load_pretrained(plain, folder)  # not wrapped yet
    _equal(plain.state_dict(), source.state_dict())
    dear.barrier()


def test_a_rank_reads_its_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from overlap.optimizer.saving import pretrained

    model, _optimizer = _wrapped("fsdp")
    dear.save_pretrained(model, folder)
    read, numbers = pretrained.read_range, []

    def counted(place: Any, start: int, stop: int, into: torch.Tensor) -> None:
        numbers.append(stop - start)
        read(place, start, stop, into)

    monkeypatch.setattr(pretrained, "read_range", counted)
    dear.load_pretrained(model, folder)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(dear.allgather_object(sum(numbers))) == total
    assert sum(numbers) <= 1.3 * total / SIZE


def test_other_types_and_layouts(folder: Path) -> None:
    def make(seed: int) -> torch.nn.Module:
        torch.default_generator.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(4, 5))
        model.register_parameter("number", torch.nn.Parameter(torch.tensor(2.5 + seed)))
        model.register_parameter("none", torch.nn.Parameter(torch.empty(0, 3)))
        return model.to(memory_format=torch.channels_last)

    model = make(1).double()
    optimizer = WRAP["fsdp"](torch.optim.SGD(model.parameters(), 0.1), model)
    dear.save_pretrained(model, folder / "double")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    _equal(safetensors.load_file(folder / "double" / "model.safetensors"), expected)
    assert not (folder / "double" / "config.json").exists()
    other = make(2)
    wrapped = WRAP["fsdp"](torch.optim.SGD(other.parameters(), 0.1), other)
    dear.load_pretrained(other, folder / "double" / "model.safetensors")
    _equal(
        dict(other.state_dict()),
        {name: value.float() if value.is_floating_point() else value for name, value in expected.items()},
    )
    dear.barrier()
    del optimizer, wrapped


def test_what_was_saved_before_is_replaced(folder: Path) -> None:
    model, _optimizer = _wrapped("fsdp", steps=0)
    dear.save_pretrained(model, folder, max_shard_mb=0.01)
    first = {path.name for path in folder.iterdir()}
    dear.save_pretrained(model, folder)
    second = {path.name for path in folder.iterdir()}
    assert second == {"model.safetensors", "config.json", "generation_config.json"}
    dear.barrier()
    dear.save_pretrained(model, folder, max_shard_mb=0.01)
    assert {path.name for path in folder.iterdir()} == first
    dear.barrier()


def test_rank_0_has_one_parameter_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from overlap.state.whole_parameters import WholeParameters

    model, _optimizer = _wrapped("fsdp")
    asked = []
    gathered = WholeParameters.gathered

    def counted(self: Any, slots: Any) -> Any:
        asked.append(len(slots))
        return gathered(self, slots)

    monkeypatch.setattr(WholeParameters, "gathered", counted)
    dear.save_pretrained(model, folder)
    away = sum(1 for parameter in model.parameters())
    assert asked == ([1] * away if dear.rank() == 0 else [])


def test_weights_of_another_model_are_refused_and_nothing_is_lost(folder: Path) -> None:
    model, _ = trained("fsdp")
    dear.save_pretrained(model, folder)
    other = double_model("Mlp")
    other.head = torch.nn.Linear(33, 8).double()
    other.more = torch.nn.Linear(2, 2).double()
    other.told = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1, dtype=torch.float64))])
    other.inner[3].register_parameter("bias", None)
    optimizer = WRAP["fsdp"](torch.optim.SGD(other.parameters(), 0.1), other)
    before = values_of(other)
    with pytest.raises(ValueError, match=r"are of another model: they have no 'more\.weight', ") as found:
        dear.load_pretrained(other, folder)
    for part in ("'told.0'", "the model has no 'inner.3.bias'; ", "'head.weight' is (9, 33) there and (8, 33) here"):
        assert part in str(found.value)
    for value, was in zip(values_of(other), before, strict=True):
        assert torch.equal(value, was)
    with pytest.raises(FileNotFoundError, match="there is no"):
        dear.load_pretrained(model, folder / "nowhere")
    local_loss(model, 1).backward()
    del optimizer


@pytest.mark.skipif(SIZE == 1, reason="takes several ranks")
def test_what_rank_0_cannot_write_is_told_to_all(folder: Path) -> None:
    model, _optimizer = trained("fsdp")
    (folder / "file").touch()
    dear.barrier()
    with pytest.raises(RuntimeError, match=r"rank 0 could not save the model in .*file"):
        dear.save_pretrained(model, folder / "file")
    values_of(model)
