"""Layers that are divided among ranks: values, gradients and training are those of one process with whole layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

import dear
import model_parallel as mp
import pipe
from model_parallel.layers import sizes
from overlap.job.axes import part_of

pytestmark = [pytest.mark.four_ranks, pytest.mark.usefixtures("sets_of_a_test")]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    mp.destroy_model_parallel()


def _all() -> int:
    """Divide tensors among all ranks."""
    mp.initialize_model_parallel(dear.size())
    return dear.size()


def _input(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _mine(whole: torch.Tensor, dim: int) -> torch.Tensor:
    return whole.split(list(sizes(whole.shape[dim], mp.get_model_parallel_world_size())), dim)[
        mp.get_model_parallel_rank()
    ]


def _close(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> None:
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("outputs", [8, 7])
@pytest.mark.parametrize("gather", [True, False])
def test_columns(outputs: int, gather: bool) -> None:
    _all()
    torch.manual_seed(dear.rank())  # the first rank's values are taken
    layer = mp.ColumnParallelLinear(6, outputs, gather_output=gather, keep_master_weight_for_test=True)
    assert layer.master_weight is not None
    assert layer.bias is not None
    x, plain = _input(3, 5, 6), _input(3, 5, 6)
    y = layer(x)
    whole = F.linear(plain, layer.master_weight.requires_grad_(), bias := torch.zeros(outputs, requires_grad=True))
    _close(y, whole if gather else _mine(whole, -1))
    weights = _input(*whole.shape, seed=2)
    (y * (weights if gather else _mine(weights, -1))).sum().backward()
    (whole * weights).sum().backward()
    _close(x.grad, plain.grad)
    _close(layer.weight.grad, _mine(layer.master_weight.grad, 0))
    _close(layer.bias.grad, _mine(bias.grad, 0))
    assert torch.equal(layer.master_weight, dear.broadcast(layer.master_weight.detach(), 0))


@pytest.mark.parametrize("inputs", [8, 7])
@pytest.mark.parametrize("parallel", [True, False])
def test_rows(inputs: int, parallel: bool) -> None:
    _all()
    layer = mp.RowParallelLinear(inputs, 6, input_is_parallel=parallel, keep_master_weight_for_test=True)
    assert layer.master_weight is not None
    assert layer.bias is not None
    x, plain = _input(3, inputs), _input(3, inputs)
    y = layer(_mine(x, -1) if parallel else x)
    whole = F.linear(plain, layer.master_weight.requires_grad_())
    _close(y, whole)
    weights = _input(3, 6, seed=2)
    (y * weights).sum().backward()
    (whole * weights).sum().backward()
    _close(layer.weight.grad, _mine(layer.master_weight.grad, 1))
    _close(layer.bias.grad, weights.sum(0))
    if parallel:
        _close(_mine(x.grad, -1), _mine(plain.grad, -1))
    else:
        _close(x.grad, plain.grad)


def test_blocks_of_a_fused_layer_are_divided_each_for_itself() -> None:
    ranks = _all()
    layer = mp.ColumnParallelLinear(6, 24, gather_output=False, stride=3, keep_master_weight_for_test=True)
    assert layer.master_weight is not None
    blocks = [_mine(block, 0) for block in layer.master_weight.chunk(3)]
    assert torch.equal(layer.weight, torch.cat(blocks))
    with pytest.raises(ValueError, match="stride=3 does not divide the 8"):
        mp.ColumnParallelLinear(6, 8, gather_output=False, stride=3)
    assert ranks == dear.size()


@pytest.mark.parametrize("padding", [None, 0, 4, -1])
@pytest.mark.parametrize("kind", [mp.ParallelEmbedding, mp.VocabParallelEmbedding])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_embeddings(kind: Callable[..., Any], padding: int | None, by_frequency: bool) -> None:
    _all()
    layer = kind(11, 7, padding_idx=padding, scale_grad_by_freq=by_frequency, keep_master_weight_for_test=True)
    plain = torch.nn.Embedding(11, 7, padding_idx=padding, scale_grad_by_freq=by_frequency)
    with torch.no_grad():
        plain.weight.copy_(layer.master_weight)
    indices = torch.tensor([[0, 4, 10, 4], [3, 10, 7, 0]])
    weights = _input(2, 4, 7)
    (layer(indices) * weights).sum().backward()
    (plain(indices) * weights).sum().backward()
    _close(layer(indices), plain(indices))
    _close(layer.weight.grad, _mine(plain.weight.grad, 1 if kind is mp.ParallelEmbedding else 0))


def test_rows_of_a_vocabulary_that_are_too_long_are_shortened_as_in_one_process() -> None:
    _all()
    layer = mp.VocabParallelEmbedding(9, 4, max_norm=0.5, keep_master_weight_for_test=True)
    plain = torch.nn.Embedding.from_pretrained(layer.master_weight.clone(), freeze=False, max_norm=0.5)
    indices = torch.tensor([1, 8, 8])
    _close(layer(indices), plain(indices))
    _close(layer.weight, _mine(plain.weight, 0))


@pytest.mark.parametrize("words", [12, 13])
def test_the_cross_entropy_of_divided_logits(words: int) -> None:
    _all()
    x, plain = _input(4, 5, words), _input(4, 5, words)
    part = _mine(x, -1).detach().requires_grad_()
    before = part.detach().clone()
    target = torch.randint(words, (4, 5), generator=torch.Generator().manual_seed(3))
    target[0, 0] = -100
    loss = mp.vocab_parallel_cross_entropy(part, target)
    whole = F.cross_entropy(plain.movedim(-1, 1), target, reduction="none")
    _close(loss, whole)
    loss.sum().backward()
    whole.sum().backward()
    _close(part.grad, _mine(plain.grad, -1))
    assert torch.equal(part, before)
    with pytest.raises(IndexError, match=f"from 0 to {words}, and logits of {words} words"):
        mp.vocab_parallel_cross_entropy(part, torch.tensor(words).expand(4, 5).index_fill(1, torch.tensor(0), 0))


def test_ways_into_and_out_of_the_shared_part() -> None:
    ranks = _all()
    x = _input(2, 7)
    out = mp.gather_from_model_parallel_region(mp.scatter_to_model_parallel_region(x), lengths=sizes(7, ranks))
    out.sum().backward()
    assert torch.equal(out, x)
    assert torch.equal(x.grad, torch.ones(2, 7))
    x = _input(2, 7)
    total = mp.reduce_from_model_parallel_region(mp.copy_to_model_parallel_region(x))
    total.sum().backward()
    _close(total, ranks * x)
    _close(x.grad, torch.full((2, 7), float(ranks)))


def test_random_numbers_differ_where_tensors_are_divided_and_nowhere_else() -> None:
    ranks = _all()
    mp.model_parallel_manual_seed(5)
    drawn = []
    for _ in range(2):
        shared = torch.rand(3)
        with mp.get_rng_tracker().fork():
            own = torch.rand(3)
        drawn.append((shared, own))
    shared = dear.allgather(drawn[0][0].unsqueeze(0))
    own = dear.allgather(torch.stack([each[1] for each in drawn]))
    assert len(shared.unique(dim=0)) == 1
    assert len(own.unique(dim=0)) == 2 * ranks
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn[0][0])


def test_a_checkpoint_draws_the_same_numbers_in_forks() -> None:
    _all()

    def run(x: torch.Tensor) -> torch.Tensor:
        with mp.get_rng_tracker().fork():
            return F.dropout(x * x, 0.5)

    gradients = []
    for wrap in (lambda x: run(x), lambda x: mp.checkpoint(run, x)):
        mp.model_parallel_manual_seed(5)
        x = _input(50)
        wrap(x).sum().backward()
        with mp.get_rng_tracker().fork():
            gradients.append((x.grad, torch.rand(1)))
    _close(gradients[0][0], gradients[1][0])
    _close(gradients[0][1], gradients[1][1])


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 20), torch.nn.Linear(20, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(torch.nn.Module):
    """A tied embedding and head around two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(21, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(8, 21, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": "rowwise",
    "head": "colwise_rep",
}


def _words() -> torch.nn.Module:
    torch.manual_seed(7)
    return Words()


def _batch(step: int, shares: int = 1, mine: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(21, (8, 6), generator=torch.Generator().manual_seed(step))
    part = words.chunk(shares)[mine]
    return part[:, :-1], part[:, 1:]


def _train(model: torch.nn.Module, optimizer: Any, shares: int = 1, mine: int = 0, clip: bool = True) -> list[float]:
    norms = []
    for step in range(4):
        x, y = _batch(step, shares, mine)
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)) if clip else 0.0)
        optimizer.step()
    return norms


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["dear", "wfbp", "fsdp", "oss"])
def test_training_equals_one_process(tensor: int, strategy: str) -> None:
    if dear.size() % tensor:
        pytest.skip("needs more ranks")
    plain = _words()
    wanted = _train(plain, torch.optim.AdamW(plain.parameters(), 0.01))
    mesh = mp.initialize_model_parallel(tensor)
    model = mp.parallelize(_words(), PLAN)
    assert model.head.weight is model.embed.weight
    optimizer = dear.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), 0.01), model, strategy=strategy, process_set=mesh.group("data")
    )
    norms = _train(model, optimizer, mp.get_data_parallel_world_size(), mp.get_data_parallel_rank())
    torch.testing.assert_close(norms, wanted, rtol=1e-10, atol=0)
    ours, theirs = model.state_dict(), plain.state_dict()
    for name, parameter in model.named_parameters():
        whole = theirs[name]
        for part in part_of(parameter):
            whole = _mine(whole, part.dim)
        torch.testing.assert_close(ours[name], whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["dear", "wfbp", "fsdp"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_norm_after_unscaling_and_the_one_that_is_logged(strategy: str, norm_type: float) -> None:
    tensor = 2 if dear.size() % 2 == 0 else 1
    plain = _words()
    mesh = mp.initialize_model_parallel(tensor)
    model = mp.parallelize(_words(), PLAN)
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, strategy=strategy, process_set=mesh.group("data")
    )
    x, y = _batch(0)
    F.cross_entropy(plain(x).flatten(0, 1), y.flatten()).backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
    x, y = _batch(0, mp.get_data_parallel_world_size(), mp.get_data_parallel_rank())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(F.cross_entropy(model(x).flatten(0, 1), y.flatten())).backward()
    scaler.unscale_(optimizer)
    _close(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type), wanted)
    _close(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type), wanted)
    scaler.step(optimizer)
    scaler.update()


def test_what_is_not_divided_begins_as_on_the_first_rank() -> None:
    _all()
    torch.manual_seed(dear.rank())
    model = mp.parallelize(Words(), PLAN)
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, process_set=mp.get_data_parallel_group())
    assert len(dear.allgather(model.blocks[1].down.bias.detach().unsqueeze(0)).unique(dim=0)) == 1
    divided = dear.allgather(model.blocks[1].up.weight.detach()[:1])
    assert len(divided.unique(dim=0)) == dear.size()


def _breaks(model: torch.nn.Module, here: bool, value: float) -> Any:
    """Let the gradient of a weight that is divided be `value` on this rank."""
    return model.blocks[0].up.weight.register_hook(lambda gradient: gradient * value if here else gradient)


@pytest.mark.parametrize("strategy", ["dear", "wfbp"])
@pytest.mark.parametrize("unscale", [False, True])
def test_an_infinity_on_one_rank_skips_the_step_on_all(strategy: str, unscale: bool) -> None:
    _all()
    model = mp.parallelize(_words(), PLAN)
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, strategy=strategy, process_set=mp.get_data_parallel_group()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for broken in (True, False):
        x, y = _batch(0)
        optimizer.zero_grad()
        handle = _breaks(model, broken and dear.rank() == 0, float("inf"))
        scaler.scale(F.cross_entropy(model(x).flatten(0, 1), y.flatten())).backward()
        handle.remove()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert same == broken
        assert scaler.get_scale() == 4.0


def test_steps_that_are_left_out_are_left_out_on_all() -> None:
    _all()
    model = mp.parallelize(_words(), PLAN)
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, on_nonfinite="skip", process_set=mp.get_data_parallel_group()
    )
    x, y = _batch(0)
    _breaks(model, dear.rank() == dear.size() - 1, float("nan"))
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    before = model.blocks[0].norm.weight.clone()
    optimizer.step()
    assert torch.equal(model.blocks[0].norm.weight, before)


@pytest.mark.parametrize("axes", [(1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 1, 2), (1, 2, 1)])
@pytest.mark.parametrize("family", ["llama", "words"])
def test_pipelines_of_divided_layers(axes: tuple[int, int, int], family: str) -> None:
    """Data, pipeline and tensor at once: training, and the norm that is clipped by, are those of one process."""
    if math.prod(axes) != dear.size():
        pytest.skip("other numbers of ranks")
    make = _llama if family == "llama" else _row_of_blocks
    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters(), 0.01)
    data, stages, tensor = axes
    mesh = mp.initialize_model_parallel(tensor, stages)
    divided = mp.parallelize(make(), None if family == "llama" else {"*.up": "colwise", "*.down": "rowwise"})
    piped = pipe.Pipe(divided, [1, 1] if stages == 2 else [2], mesh=mesh, chunks=2, loss=_loss_of)
    ours = dear.DistributedOptimizer(torch.optim.AdamW(piped.parameters(), 0.01), piped, process_set=mesh.group("data"))
    for step in range(3):
        x, y = _words_or_values(family, step)
        optimizer.zero_grad()
        found = plain(x)
        wanted = _loss_of(found if isinstance(found, torch.Tensor) else found.logits, y)
        wanted.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        ours.zero_grad()
        mine = mp.get_data_parallel_rank()
        loss = piped.step(x.chunk(data)[mine], target=y.chunk(data)[mine])
        torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(piped.parameters(), 0.1), norm, rtol=1e-8, atol=0)
        ours.step()
        loss = dear.allreduce(loss, process_set=mesh.group("data"))
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-8, atol=0)


def _loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.dtype is torch.int64:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())
    return (output - target).square().mean()


def _words_or_values(family: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    if family == "llama":
        return _batch(step)
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def _row_of_blocks() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(Block(), Block())


def _llama() -> torch.nn.Module:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        vocab_size=21,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: torch.nn.Module = transformers.LlamaForCausalLM(config).double()
    return model


def test_what_cannot_be_divided_is_refused_in_a_sentence() -> None:
    _all()
    model = _words()
    with pytest.raises(ValueError, match=r"no module of Words is named 'blocks.*.upp'"):
        mp.parallelize(model, {"blocks.*.upp": ColwiseParallel()})
    with pytest.raises(NotImplementedError, match=r"'blocks.0.norm' is a LayerNorm"):
        mp.parallelize(model, {"blocks.0.norm": ColwiseParallel()})
    if dear.size() > 1:
        with pytest.raises(NotImplementedError, match=r"share a weight|which is divided"):
            mp.parallelize(model, {"head": "rowwise_rep"})
    with pytest.raises(ValueError, match="Words has no plan of its own"):
        mp.parallelize(model)
    with pytest.raises(NotImplementedError, match="context_parallel_size=2"):
        mp.initialize_model_parallel(1, 1, 2)
    with pytest.raises(NotImplementedError, match=r"timeout=3: .* see DEAR_STALL_ABORT_SECONDS"):
        mp.initialize_model_parallel(1, timeout=3)
    if dear.size() > 1:
        with pytest.raises(NotImplementedError, match=r"max_norm=0\.5: no rank has a whole row"):
            mp.ParallelEmbedding(9, 4 * dear.size(), max_norm=0.5)
    mp.destroy_model_parallel()
    with pytest.raises(RuntimeError, match=r"call model_parallel.initialize_model_parallel"):
        mp.ColumnParallelLinear(2, 2)
