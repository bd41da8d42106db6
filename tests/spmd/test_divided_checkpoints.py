"""Checkpoints of models that are divided by tensor parallelism and pipelines: one of the whole model, for any grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import dear
import model_parallel as mp
import pipe
from overlap.state.chunks import Chunked
from tests.spmd_plugin import SIZE

pytestmark = [pytest.mark.four_ranks, pytest.mark.usefixtures("sets_of_a_test")]

#: data × pipeline × tensor
GRIDS = {
    1: [(1, 1, 1)],
    2: [(1, 1, 2), (1, 2, 1), (2, 1, 1)],
    4: [(1, 2, 2), (2, 1, 2), (1, 1, 4), (2, 2, 1), (4, 1, 1)],
}.get(SIZE, [(SIZE, 1, 1)])
#: From one grid to the next.
WAYS = [(one, GRIDS[(number + 1) % len(GRIDS)]) for number, one in enumerate(GRIDS)]
#: That write, and that read.
STRATEGIES = [("dear", "fsdp"), ("fsdp", "oss"), ("oss", "wfbp"), ("wfbp", "dear")]
DIVIDED = pytest.mark.skipif(SIZE == 1, reason="takes several ranks")


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    mp.destroy_model_parallel()


class Block(torch.nn.Module):
    """Lengths that no number of ranks divides, and a buffer."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.up, self.down = torch.nn.Linear(6, inner), torch.nn.Linear(inner, 6)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale.mean()


def _blocks(seed: int, inner: int = 13) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Block(inner) for _ in range(2)))


def _llama(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=24,
        vocab_size=21,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: torch.nn.Module = transformers.LlamaForCausalLM(config).double()
    return model


def _gpt2(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=21, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config).double().eval()  # without dropout
    return model


MODELS: dict[str, Callable[[int], torch.nn.Module]] = {"blocks": _blocks, "llama": _llama, "gpt2": _gpt2}
PLANS = {"blocks": {"*.up": "colwise", "*.down": "rowwise"}, "llama": None, "gpt2": {}}


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.dtype is torch.int64:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())
    return (output - target).square().mean()


def _batch(family: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    if family == "blocks":
        return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)
    words = torch.randint(21, (8, 6), generator=generator)
    return words[:, :-1], words[:, 1:]


def _adamw(model: torch.nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    """Matrices, and the rest without decay."""
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "lr": lr / 2, "weight_decay": 0.0}], lr)


def _alone(family: str, steps: int, seed: int = 5, lr: float = 0.01) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """One process with the whole model."""
    model = MODELS[family](seed)
    optimizer = _adamw(model, lr)
    _train_alone(model, optimizer, family, range(steps))
    return model, optimizer


def _train_alone(model: torch.nn.Module, optimizer: torch.optim.Optimizer, family: str, steps: range) -> None:
    for step in steps:
        x, y = _batch(family, step)
        optimizer.zero_grad()
        found = model(x)
        _loss(found if isinstance(found, torch.Tensor) else found.logits, y).backward()
        optimizer.step()


def _divided(
    family: str, grid: tuple[int, int, int], strategy: str, steps: int, seed: int = 5, lr: float = 0.01
) -> tuple[Any, Any]:
    """What `_alone` makes, on a grid of ranks."""
    mp.destroy_model_parallel()
    _, stages, tensor = grid
    mesh = mp.initialize_model_parallel(tensor, stages)
    module = mp.parallelize(MODELS[family](seed), PLANS[family])
    model = pipe.Pipe(module, [1, 1] if stages == 2 else [2], mesh=mesh, chunks=2, loss=_loss)
    optimizer = dear.DistributedOptimizer(_adamw(model, lr), model, strategy=strategy, process_set=mesh.group("data"))
    _train(model, optimizer, family, range(steps))
    return model, optimizer


def _train(model: Any, optimizer: Any, family: str, steps: range) -> None:
    for step in steps:
        x, y = _batch(family, step)
        shares, mine = mp.get_data_parallel_world_size(), mp.get_data_parallel_rank()
        optimizer.zero_grad()
        model.step(x.chunk(shares)[mine], target=y.chunk(shares)[mine])
        optimizer.step()


def _equal(model: Any, plain: torch.nn.Module) -> None:
    """The whole model is that of one process."""
    found = dear.full_state_dict(model)
    if dear.rank():
        assert found == {}
        return
    wanted = plain.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-7, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def _read(path: Path, family: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Torch reads the checkpoint in this process alone, into another model."""
    model, optimizer = _alone(family, 1, seed=8, lr=0.3)
    own, osd = get_state_dict(model, optimizer)
    state = {"model": own, "optim": osd}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return model, optimizer


@pytest.mark.parametrize(("one", "other"), WAYS, ids=str)
@pytest.mark.parametrize("strategies", STRATEGIES, ids="-".join)
@pytest.mark.parametrize("family", ["blocks", pytest.param("llama", marks=pytest.mark.full)])
def test_one_grid_writes_and_another_one_reads(
    family: str, strategies: tuple[str, str], one: Any, other: Any, folder: Path
) -> None:
    plain, inner = _alone(family, 2)
    model, optimizer = _divided(family, one, strategies[0], 2)
    dear.save_checkpoint(folder / "one", model, optimizer, extra={"step": 2})
    _equal(model, plain)
    fresh, theirs = _divided(family, other, strategies[1], 1, seed=6, lr=0.5)
    assert dear.load_checkpoint(folder / "one", fresh, theirs) == {"step": 2}
    assert [group["lr"] for group in theirs.param_groups] == [0.01, 0.005]
    _equal(fresh, plain)
    _train_alone(plain, inner, family, range(2, 4))
    _train(fresh, theirs, family, range(2, 4))
    _equal(fresh, plain)
    if dear.rank() == 0:
        read, moments = _read(folder / "one", family)
        _train_alone(read, moments, family, range(2, 4))
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(read.state_dict()[name], value, rtol=1e-7, atol=1e-10)
    dear.barrier()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("strategy", ["dear", "wfbp", "fsdp", "oss"])
@pytest.mark.parametrize("family", ["blocks", pytest.param("llama", marks=pytest.mark.full)])
def test_one_process_writes_and_a_grid_reads(family: str, strategy: str, grid: Any, folder: Path) -> None:
    plain, inner = _alone(family, 2)
    if dear.rank() == 0:
        own, osd = get_state_dict(plain, inner)
        dcp.save({"model": own, "optim": osd}, checkpoint_id=folder / "one", no_dist=True)
    dear.barrier()
    model, optimizer = _divided(family, grid, strategy, 1, seed=6, lr=0.5)
    dear.load_checkpoint(folder / "one", model, optimizer)
    _train_alone(plain, inner, family, range(2, 4))
    _train(model, optimizer, family, range(2, 4))
    _equal(model, plain)


@DIVIDED
@pytest.mark.parametrize("strategy", ["dear", "wfbp"])
def test_a_parameter_of_two_stages_has_both_names(strategy: str, folder: Path) -> None:
    plain, inner = _alone("gpt2", 2)
    model, optimizer = _divided("gpt2", (SIZE // 2, 2, 1), strategy, 2)
    dear.save_checkpoint(folder / "one", model, optimizer)
    _equal(model, plain)
    held = [name for name, value in dear.sharded_state_dict(model)["model"].items() if name == "lm_head.weight"]
    assert len(held) == (mp.get_mesh().coordinate["pipeline"] == 0)
    fresh, theirs = _divided("gpt2", (SIZE // 2, 2, 1), strategy, 1, seed=6, lr=0.5)
    dear.load_checkpoint(folder / "one", fresh, theirs)
    _train_alone(plain, inner, "gpt2", range(2, 4))
    _train(fresh, theirs, "gpt2", range(2, 4))
    _equal(fresh, plain)
    if dear.rank() == 0:
        read, moments = _read(folder / "one", "gpt2")
        _train_alone(read, moments, "gpt2", range(2, 4))
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(read.state_dict()[name], value, rtol=1e-7, atol=1e-10)
    dear.barrier()


class Words(torch.nn.Module):
    """A tied embedding and head, without a pipeline."""

    def __init__(self, words: int = 21) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(words, 8), torch.nn.Linear(8, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x).tanh())


WORDS = {"embed": "embedding_rowwise", "head": "colwise_rep"}


def _words(
    strategy: str, seed: int, optimizer: Callable[..., Any] = torch.optim.AdamW, **shape: int
) -> tuple[Any, Any]:
    """With tensors that all ranks have parts of, and two steps."""
    mp.destroy_model_parallel()
    mesh = mp.initialize_model_parallel(SIZE)
    torch.manual_seed(seed)
    model = mp.parallelize(Words(**shape), WORDS)
    wrapped = dear.DistributedOptimizer(
        optimizer(model.parameters(), 0.1), model, strategy=strategy, process_set=mesh.group("data")
    )
    for step in range(2):
        x, y = _batch("words", step)
        wrapped.zero_grad()
        _loss(model(x), y).backward()
        wrapped.step()
    return model, wrapped


@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("strategy", ["dear", "wfbp", "fsdp", "oss"])
def test_rows_of_a_vocabulary(strategy: str, background: bool, folder: Path) -> None:
    """Without a pipeline, bit for bit; each row is written once."""
    model, optimizer = _words(strategy, 1)
    wanted = dear.full_state_dict(model)
    saved = dear.save_checkpoint(folder / "one", model, optimizer, background=background)
    with torch.no_grad(), dear.whole(model):
        model.embed.weight.zero_()
    saved.result()
    dear.barrier()
    fresh, theirs = _words(strategy, 2)
    dear.load_checkpoint(folder / "one", fresh, theirs)
    found = dear.full_state_dict(fresh)
    assert wanted.keys() == found.keys() == ({"embed.weight", "head.weight"} if dear.rank() == 0 else set())
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    metadata = FileSystemReader(folder / "one").read_metadata().state_dict_metadata
    rows = metadata["optim.state.embed.weight.exp_avg"]
    assert sum(math.prod(chunk.sizes) for chunk in rows.chunks) == 21 * 8


@DIVIDED
def test_blocks_of_a_fused_layer(folder: Path) -> None:
    mp.initialize_model_parallel(SIZE)
    layer = mp.ColumnParallelLinear(6, 33, gather_output=False, stride=3, keep_master_weight_for_test=True)
    assert layer.master_weight is not None
    dear.save_checkpoint(folder / "one", layer)
    found = dear.full_state_dict(layer)
    if dear.rank() == 0:
        assert torch.equal(found["weight"], layer.master_weight)
        state = {"model": torch.nn.Linear(6, 33).state_dict()}
        dcp.load(state, checkpoint_id=folder / "one", no_dist=True)
        assert torch.equal(state["model"]["weight"], layer.master_weight)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.zero_()
    dear.load_checkpoint(folder / "one", layer)
    assert torch.equal(layer.weight, before)


@DIVIDED
def test_what_copies_have_is_written_by_one_of_them() -> None:
    grid = (SIZE // 2, 1, 2)
    model, optimizer = _divided("blocks", grid, "fsdp", 1)
    state = dear.sharded_state_dict(model, optimizer)
    told = dear.allgather_object([(name, isinstance(value, Chunked)) for name, value in state["model"].items()])
    first = mp.get_mesh().ranks("data") if dear.rank() == 0 else None
    first = dear.broadcast_object(first)
    for rank, names in enumerate(told):
        assert ("0.norm.weight", True) in names if rank in first else "0.norm.weight" not in dict(names)
        assert ("0.up.weight", True) in names
        assert ("0.scale" in dict(names)) == (rank == 0)
    assert len(state["optim"]["param_groups"]) == 2
    names = list(itertools.chain(*(group["params"] for group in state["optim"]["param_groups"])))
    assert sorted(names) == sorted(name for name, _ in _blocks(1).named_parameters())


@DIVIDED
def test_a_checkpoint_of_other_shapes_is_refused_on_every_rank(folder: Path) -> None:
    model, optimizer = _words("dear", 1)
    dear.save_checkpoint(folder / "one", model, optimizer)
    other, theirs = _words("dear", 1, words=23)
    before = other.embed.weight.detach().clone()
    with pytest.raises(ValueError, match=r"'embed.weight' is \(21, 8\) there and \(23, 8\) here"):
        dear.load_checkpoint(folder / "one", other, theirs)
    assert torch.equal(other.embed.weight, before)
    stage, inner = _divided("blocks", (SIZE // 2, 2, 1), "dear", 0)
    with pytest.raises(ValueError, match=r"it has no '0.scale', .*; the model has no 'embed.weight', 'head.weight'"):
        dear.load_checkpoint(folder / "one", stage, inner)


@DIVIDED
def test_state_of_which_nobody_knows_the_place_is_refused_on_every_rank(folder: Path) -> None:
    model, optimizer = _words("oss", 1, torch.optim.Adafactor)
    with pytest.raises(ValueError, match=r"'embed.weight' is divided among ranks, and its state '\w+' has the shape"):
        dear.save_checkpoint(folder / "one", model, optimizer)
    dear.save_checkpoint(folder / "one", model)
    plain = Words()
    inner = torch.optim.Adafactor(plain.parameters(), 0.1)
    _train_alone(plain, inner, "words", range(1))
    if dear.rank() == 0:
        own, osd = get_state_dict(plain, inner)
        dcp.save({"model": own, "optim": osd}, checkpoint_id=folder / "two", no_dist=True)
    dear.barrier()
    with pytest.raises(ValueError, match=r"'embed.weight' is divided among ranks, and its state '\w+' has the shape"):
        dear.load_checkpoint(folder / "two", model, optimizer)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_transformers_loads_the_whole_model(family: str, grid: Any, folder: Path) -> None:
    if family == "gpt2" and grid[2] > 1:
        pytest.skip("its layers cannot be divided")
    plain, _ = _alone(family, 2)
    model, _optimizer = _divided(family, grid, "dear", 2)
    dear.save_pretrained(model, folder / "weights")
    if dear.rank() == 0:
        plain.config.save_pretrained(folder / "weights")
        found = type(plain).from_pretrained(folder / "weights")
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found.state_dict()[name].double(), value, rtol=1e-5, atol=1e-6)
    dear.barrier()


@pytest.mark.skipif(SIZE != 4, reason="takes copies of parts")
@pytest.mark.parametrize("strategy", ["dear", "fsdp"])
def test_frozen_parts_that_ranks_of_a_host_share(strategy: str, folder: Path) -> None:
    """Ranks along `data` map one memory, and ranks along `tensor` another."""
    mesh = mp.initialize_model_parallel(2)
    torch.manual_seed(1)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    plain[0].requires_grad_(False)
    model = mp.parallelize(plain, {"0": "colwise", "1": "rowwise"})
    optimizer = dear.DistributedOptimizer(
        torch.optim.AdamW(model[1].parameters(), 0.1), model, strategy=strategy, process_set=mesh.group("data")
    )
    wanted = [model[0].weight.detach().clone(), dear.full_state_dict(model)]
    assert wanted[1].get("0.weight", torch.empty(64, 64)).shape == (64, 64)
    dear.save_checkpoint(folder / "one", model, optimizer)
    with torch.no_grad():
        model[0].weight.zero_()
    dear.load_checkpoint(folder / "one", model, optimizer)
    assert torch.equal(model[0].weight, wanted[0])
    found = dear.full_state_dict(model)
    assert found.keys() == wanted[1].keys()
    assert all(torch.equal(found[name], value) for name, value in wanted[1].items())
