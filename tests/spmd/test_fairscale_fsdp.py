"""``fsdp.FullyShardedDataParallel`` as scripts for fairscale use it: equal to one process, with plain names."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
import fsdp
from fsdp import FSDP, auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap
from oss import ShardedGradScaler, checkpoint_wrapper
from tests.spmd.training import same_everywhere
from tests.spmd_plugin import SIZE

WIDTH, WORDS, TOKENS = 12, 37, 5
# With a large eps: biases of keys have no gradient but for rounding.
Adam = functools.partial(torch.optim.Adam, lr=0.01, eps=0.01, weight_decay=0.1)


class Layer(torch.nn.Module):
    """Attention and a feed-forward network, called with tensors by position and name, and with what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(3 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, *, options: dict[str, Any]) -> dict[str, Any]:
        found, _ = self.attention(x, x, x, need_weights=False)
        return {"x": self.norm(x + found + self.down(options["act"](self.up(x)))), "name": "layer"}


class Bert(torch.nn.Module):
    """Small, with a head that is tied to the embedding, and a buffer that changes."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(TOKENS, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.head = torch.nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> torch.Tensor:
        if self.training:
            self.seen += 1
        x = self.words(tokens) + self.places(torch.arange(TOKENS))
        for layer in self.layers:
            x = layer(x, options={"act": act})["x"]
        return self.head(x * self.scale)


def _bert(seed: int = 3) -> Bert:
    torch.default_generator.manual_seed(seed)
    return Bert().double()


def _by_hand(model: Bert, **options: Any) -> Any:
    """Wrappers in wrappers: of parts of a layer, of layers, and of the model."""
    for number, layer in enumerate(model.layers):
        layer.up = FSDP(layer.up, **options)
        model.layers[number] = FSDP(layer, **options)
    return FSDP(model, **options)


def _whole(model: Bert, **options: Any) -> Any:
    return FSDP(model, **options)


def _by_size(model: Bert, **options: Any) -> Any:
    """As in fairscale's scripts: the model itself is too small for a wrapper once its parts have theirs."""
    fsdp_args = fsdp.gen_fsdp_args(nnodes=2, nproc_per_node=2, gsdp_type="none", model_type="bert-large")
    with enable_wrap(wrapper_cls=FSDP, **fsdp_args, **options):
        my_auto_wrap_policy = functools.partial(default_auto_wrap_policy, min_num_params=300)
        return auto_wrap(model, auto_wrap_policy=my_auto_wrap_policy)


def _by_size_and_around(model: Bert, **options: Any) -> Any:
    return FSDP(_by_size(model, **options), **options)


def _lines(module: torch.nn.Module, recurse: bool, unwrapped_params: int) -> bool:
    """A policy for older versions, which have no `module_is_root`."""
    return recurse or type(module) is torch.nn.Linear


def _parts_by_policy(model: Bert, **options: Any) -> Any:
    """What is left in a part that was wrapped by a policy is the outer wrapper's."""
    with enable_wrap(wrapper_cls=FSDP, **options):
        model.layers[0] = auto_wrap(model.layers[0], _lines)
        assert not isinstance(model.layers[0], FSDP)
        model = wrap(model)
    assert type(model.layers[0]) is Layer
    return model


def _by_marks(model: Bert, **options: Any) -> Any:
    for layer in model.layers:
        layer.wrapper_config = {"reshard_after_forward": False}
    with enable_wrap(auto_wrap_policy=config_auto_wrap_policy, wrapper_cls=FSDP, **options):
        return FSDP(auto_wrap(model), **options)


def _by_parts(model: Bert, **options: Any) -> Any:
    """The model itself is left as it is, and begins with a module that no wrapper is around: values have to be alike."""
    with enable_wrap(wrapper_cls=FSDP, **options):
        for number in (0, 2):
            model.layers[number] = wrap(model.layers[number])
        model.places = wrap(model.places)
    return model


WAYS = (_by_hand, _whole, _by_size, _by_size_and_around, _parts_by_policy, _by_marks, _by_parts)


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(100 * step + rank))
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())


class _Twins:
    """A wrapped model, and the same one in one process that gets the batches of all ranks."""

    def __init__(self, way: Callable[..., Any] = _by_hand, first: bool = False, **options: Any) -> None:
        plain, self.alone = _bert(), _bert()
        if dear.rank() > 0 and way is not _by_parts:  # rank 0's values count
            for parameter in plain.parameters():
                parameter.data.mul_(0.5)
        self.reference = Adam(self.alone.parameters())
        optimizer = Adam(plain.parameters()) if first else None
        self.mine = way(plain, **options)
        self.optimizer: Any = Adam(self.mine.parameters()) if optimizer is None else optimizer

    def backward(self, step: int) -> None:
        _loss(self.mine, step, dear.rank()).backward()
        seen = self.alone.seen.clone()
        for rank in range(SIZE):
            self.alone.seen.copy_(seen)
            (_loss(self.alone, step, rank) / SIZE).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.reference.step()
        self.optimizer.zero_grad()
        self.reference.zero_grad()

    def train(self, steps: int = 1) -> None:
        for step in range(steps):
            self.backward(step)
            self.step()

    def check(self) -> None:
        _same(self.mine.state_dict(), self.alone.state_dict())


def _same(mine: Any, expected: Any) -> None:
    assert list(mine) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            mine[name], value, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


# - Training


@pytest.mark.parametrize("first", [True, False], ids=["optimizer first", "optimizer last"])
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_one_process(way: Callable[..., Any], first: bool) -> None:
    """Whatever is wrapped, averages include it, and names are the plain model's."""
    twins = _Twins(way, first)
    for step in range(3):
        twins.backward(step)
        twins.step()
        twins.check()
    assert [name for name, _ in twins.mine.named_parameters()] == [name for name, _ in twins.alone.named_parameters()]
    assert [name for name, _ in twins.mine.named_buffers()] == ["seen"]
    assert isinstance(twins.optimizer, torch.optim.Adam)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"disable_reshard_on_root": False},
        {"bucket_cap_mb": 0},
        {"bucket_cap_mb": 25, "gradient_predivide_factor": 2.0},
        {"flatten_parameters": False, "cpu_offload": True, "move_params_to_cpu": True, "move_grads_to_cpu": True},
        {"clear_autocast_cache": True, "verbose": True, "compute_device": torch.device("cpu")},
        {"buffer_dtype": torch.float64, "compute_dtype": torch.float64, "process_group_reduce_scatter": "default"},
    ],
    ids=lambda options: ",".join(options),
)
def test_options_do_not_change_values(options: dict[str, Any]) -> None:
    twins = _Twins(_by_hand, **options)
    twins.train(3)
    twins.check()


def test_options_change_what_they_say() -> None:
    """How long parameters are whole, and how large buckets are."""
    inside = {"layers.0", "layers.1", "layers.2"}
    for reshard, on_root in ((True, True), (True, False), (False, False)):
        twins = _Twins(_by_hand, reshard_after_forward=reshard, disable_reshard_on_root=on_root)
        twins.train(1)
        names = {id(each): name for name, each in twins.mine.named_parameters()}
        kept = {names[id(slot.param)] for bucket in twins.optimizer.buckets for slot in bucket.slots if _stays(bucket)}
        expected = {name for name in names.values() if not reshard or (on_root and name[:8] not in inside)}
        assert kept == expected
    counts = []
    for megabytes in (0, 25):
        twins = _Twins(_whole, bucket_cap_mb=megabytes)
        twins.train(1)
        counts.append(len(twins.optimizer.buckets))
    assert counts[0] > counts[1]


def _stays(bucket: Any) -> bool:
    return bool(bucket.plan.residency.name == "FREED_AFTER_BACKWARD")


def test_a_rank_keeps_its_share() -> None:
    twins = _Twins()
    twins.train(2)
    held = sum(value.numel() for value in twins.mine.local_state_dict().values())
    total = sum(value.numel() for value in twins.mine.state_dict().values())
    assert held < 0.75 * total or SIZE == 1
    assert all(torch.isnan(each).all() for each in twins.mine.parameters()) or SIZE == 1


def test_accumulation_with_and_without_no_sync() -> None:
    """One pass or two before each step; inside no_sync() gradients are local and whole."""
    twins = _Twins()
    for step in range(3):
        with twins.mine.no_sync():
            twins.backward(3 * step)
        twins.backward(3 * step + 1)
        twins.backward(3 * step + 2)
        twins.step()
        twins.check()
    twins.backward(10)
    assert twins.mine.params_with_grad == list(twins.mine.parameters())


@pytest.mark.parametrize("norm_type", [2.0, 1, float("inf")])
def test_the_norm_is_that_of_all_shards(norm_type: float) -> None:
    twins = _Twins()
    for step in range(3):
        twins.backward(step)
        norm = twins.mine.clip_grad_norm_(0.05, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(twins.alone.parameters(), 0.05, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=1e-12)
        twins.step()
        twins.check()


def test_calls_of_the_outermost_wrapper_alone() -> None:
    twins = _Twins()
    for call in (lambda one: one.clip_grad_norm_(1.0), lambda one: one.no_sync().__enter__()):
        with pytest.raises(RuntimeError, match="inside of Bert: call it on the wrapper of that"):
            call(twins.mine.layers[0])


def test_auto_wrap_leaves_nothing() -> None:
    """The model is not wrapped, and what is left in it is sharded, and has rank 0's values, from its first use on."""
    torch.default_generator.manual_seed(dear.rank())
    with enable_wrap():
        model: Any = auto_wrap(torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.Linear(3, 3)), _lines)
    model[0].weight.data.fill_(1.0 + dear.rank())
    assert [isinstance(each, FSDP) for each in (model, *model)] == [False, False, True]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    output = model(torch.arange(3.0))
    same_everywhere(output.detach())
    output.sum().backward()
    optimizer.step()
    assert all(torch.isnan(each).all() for each in model.parameters()) or SIZE == 1
    for value in model.state_dict().values():
        same_everywhere(value)


def test_wrapped_modules_that_nothing_holds_together_are_refused() -> None:
    parts = [FSDP(torch.nn.Linear(3, 3)), FSDP(torch.nn.Linear(3, 3))]
    optimizer = torch.optim.SGD([each for part in parts for each in part.parameters()], 0.1)
    with pytest.raises(RuntimeError, match="trains Linear, Linear, which are wrapped and in no module together"):
        parts[0](torch.ones(2, 3))
    del optimizer


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs Tensor.grad_dtype")
@pytest.mark.parametrize("fp32", [True, False])
def test_mixed_precision(fp32: bool) -> None:
    """Passes compute in 16 bits, shards and state dicts are exact, and gradients travel as they should."""
    types: list[torch.dtype] = []
    torch.default_generator.manual_seed(0)
    inner = torch.nn.Linear(8, 8)
    inner.register_forward_hook(lambda _module, inputs, output: types.extend((inputs[0].dtype, output.dtype)))
    options = {"mixed_precision": True, "compute_dtype": torch.bfloat16, "fp32_reduce_scatter": fp32}
    model = FSDP(torch.nn.Sequential(torch.nn.Linear(8, 8), FSDP(inner, **options)), **options)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        output = model(torch.ones(2, 8) * (1 + dear.rank()))
        output.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(types) == {torch.bfloat16}
    saved = model.state_dict()
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    same_everywhere(saved["0.weight"])


def test_inputs_in_fp32() -> None:
    model = FSDP(torch.nn.Linear(3, 3), force_input_to_fp32=True)
    assert model(torch.ones(2, 3, dtype=torch.bfloat16)).dtype is torch.float32


def test_a_scaler_looks_at_all_shards() -> None:
    twins = _Twins()
    scaler = ShardedGradScaler(init_scale=4.0)
    for step in range(4):
        loss = _loss(twins.mine, step, dear.rank())
        scaler.scale(loss * (float("inf") if step == 1 and dear.rank() == SIZE - 1 else 1.0)).backward()
        scaler.unscale_(twins.optimizer)
        twins.mine.clip_grad_norm_(0.05)
        scaler.step(twins.optimizer)
        scaler.update()
        twins.optimizer.zero_grad()
        seen = twins.alone.seen.clone()
        for rank in range(SIZE):
            twins.alone.seen.copy_(seen)
            (_loss(twins.alone, step, rank) / SIZE).backward()
        torch.nn.utils.clip_grad_norm_(twins.alone.parameters(), 0.05)
        if step != 1:
            twins.reference.step()
        twins.reference.zero_grad()
    _same(twins.mine.state_dict(), twins.alone.state_dict())
    assert scaler.get_scale() == 2.0


def test_activation_checkpoints() -> None:
    """fairscale's way: inside of wrappers, and around them."""
    twins = _Twins(_checkpointed)
    twins.train(3)
    twins.check()


def _checkpointed(model: Bert) -> Any:
    for number, layer in enumerate(model.layers):
        layer.up = checkpoint_wrapper(FSDP(layer.up)) if number else FSDP(layer.up)
        model.layers[number] = FSDP(checkpoint_wrapper(layer))
    return FSDP(model)


# - Wrapping


def test_policies_decide_by_size() -> None:
    model: Any = _by_size_and_around(_bert())
    wrapped = {name for name, each in model.named_modules() if isinstance(each, FSDP)}
    parts = {f"layers.{number}{part}" for number in range(3) for part in ("", ".up", ".down")}
    assert wrapped == {"", "words", "head", *parts}  # no list, and neither attention nor what is in it
    assert type(model.module.layers) is torch.nn.ModuleList


def test_outside_the_context_nothing_is_wrapped() -> None:
    for function in (wrap, auto_wrap):
        module = torch.nn.Linear(3, 3)
        assert function(module) is module
        assert type(module) is torch.nn.Linear


def test_arguments_come_from_the_context_the_mark_and_the_call() -> None:
    module = torch.nn.Linear(3, 3)
    module.wrapper_config = {"verbose": True, "bucket_cap_mb": 2}  # type: ignore[assignment]
    with enable_wrap(wrapper_cls=lambda given, **config: (given, config), bucket_cap_mb=1, cpu_offload=True):
        with enable_wrap(wrapper_cls=FSDP):
            assert isinstance(wrap(torch.nn.Linear(3, 3)), FSDP)
        found: Any = wrap(module, verbose=False)
    assert found == (module, {"bucket_cap_mb": 2, "cpu_offload": True, "verbose": False})
    assert wrap(module) is module


def test_a_policy_for_older_versions() -> None:
    with enable_wrap():
        model: Any = auto_wrap(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), _lines)
        with pytest.raises(ValueError, match="a wrapper inside, '0'"):
            auto_wrap(model)
    assert isinstance(model[0], FSDP)
    assert len(fsdp.get_fsdp_instances(model)) == 1


# - Whole parameters and state


def test_whole_parameters_are_read_and_written() -> None:
    twins = _Twins()
    twins.train(1)

    def halve(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            with torch.no_grad():
                module.bias.mul_(0.5)

    with twins.mine.summon_full_params():
        for mine, expected in zip(twins.mine.parameters(), twins.alone.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-10)
        if dear.rank() == 0:
            twins.mine.eval()
            assert twins.mine.module(torch.zeros(1, TOKENS, dtype=torch.long)).isfinite().all()
            twins.mine.train()
    assert twins.mine.apply(halve) is twins.mine
    twins.alone.apply(halve)
    twins.check()
    twins.train(1)
    twins.check()
    with pytest.raises(NotImplementedError, match="recurse"), twins.mine.summon_full_params(recurse=False):
        pass


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("way", [_by_hand, _by_size])
def test_whole_state_dicts_come_and_go(way: Callable[..., Any], trained: bool) -> None:
    """From a plain model into a wrapped one and back, before and after it is sharded, with the optimizer's state."""
    twins = _Twins(way)
    twins.train(2)
    saved = copy.deepcopy((twins.mine.state_dict(), twins.optimizer.state_dict()))
    _bert(9).load_state_dict(saved[0])
    other = _Twins(way)
    if trained:
        other.train(1)
    other.mine.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    other.alone.load_state_dict(saved[0])
    other.reference.load_state_dict(twins.reference.state_dict())
    other.check()
    other.train(2)
    other.check()


def test_names_that_do_not_fit_are_told_without_wrappers() -> None:
    twins = _Twins()
    saved = twins.mine.state_dict()
    saved["layers.0.more"] = saved.pop("layers.0.up.weight")
    found = twins.mine.load_state_dict(saved, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["layers.0.up.weight"], ["layers.0.more"])
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "layers\.0\.up\.weight"'):
        twins.mine.load_state_dict(saved)
    saved["layers.0.up.weight"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0\.up\.weight"):
        twins.mine.load_state_dict(saved)


def test_versions_of_modules_are_found() -> None:
    class Versioned(torch.nn.Linear):
        _version = 7
        met: Any = None

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
            self.met = local_metadata.get("version")
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    inner = Versioned(3, 3)
    model = FSDP(torch.nn.Sequential(FSDP(inner)))
    saved = model.state_dict()
    assert list(saved._metadata) == ["", "0"]
    model.load_state_dict(saved)
    assert inner.met == 7


@pytest.mark.parametrize("way", [_by_hand, _whole])
def test_local_state_dicts_are_consolidated_and_loaded(way: Callable[..., Any]) -> None:
    """By one process from all ranks' files; by each rank its own: of a model that is sharded, is not yet, or otherwise."""
    twins = _Twins(way)
    twins.train(2)
    mine, told = twins.mine.local_state_dict(), twins.mine.local_metadata_dict()
    weights, metadata = dear.allgather_object(mine), dear.allgather_object(told)
    whole = FSDP.consolidate_shard_weights(weights, metadata)
    assert whole.keys() == twins.alone.state_dict().keys()
    _same({name: whole[name] for name in twins.alone.state_dict()}, twins.alone.state_dict())
    without = FSDP.consolidate_shard_weights(weights, metadata, with_module_buffers=False)
    assert whole.keys() - without.keys() == {"seen"}

    fresh, again, another = _Twins(way), _Twins(way), _Twins(way, bucket_cap_mb=0)
    again.train(1)
    another.train(1)
    for other in (fresh, again, another):
        before = other.mine.local_state_dict()
        found = other.mine.load_local_state_dict(mine)
        assert (found.missing_keys, found.unexpected_keys) == ([], [])
        _same(other.mine.state_dict(), twins.alone.state_dict())
        assert list(before) == list(other.mine.local_state_dict())
    again.alone.load_state_dict(twins.alone.state_dict())
    again.train(1)
    again.check()


def test_local_state_dicts_that_do_not_fit_are_refused() -> None:
    twins = _Twins(_whole)
    twins.train(1)
    mine = twins.mine.local_state_dict()
    kept = twins.mine.state_dict()["words.weight"].clone()
    broken = {**mine, "words.weight": mine["words.weight"][1:]} if dear.rank() == 0 else mine
    with pytest.raises(ValueError, match=r"the shares of 'words.weight' have .* as many ranks"):
        twins.mine.load_local_state_dict(broken)
    with pytest.raises(ValueError, match="rank 0 was given a state dict that lacks 'scale'"):
        twins.mine.load_local_state_dict(
            {name: value for name, value in mine.items() if name != "scale" or dear.rank()}
        )
    assert torch.equal(twins.mine.state_dict()["words.weight"], kept)
    weights = dear.allgather_object(mine)
    metadata = dear.allgather_object(twins.mine.local_metadata_dict())
    with pytest.raises(ValueError, match="one of each for every rank"):
        FSDP.consolidate_shard_weights(weights, metadata[1:])
    if SIZE > 1:
        with pytest.raises(ValueError, match=r"have .* elements together"):
            FSDP.consolidate_shard_weights(weights[1:], metadata[1:])
    del weights[0]["scale"]
    with pytest.raises(KeyError, match="scale"):
        FSDP.consolidate_shard_weights(weights, metadata)
    assert "scale" not in FSDP.consolidate_shard_weights(weights, metadata, strict=False)


def test_optimizer_state_is_gathered_and_cut() -> None:
    twins = _Twins()
    twins.train(2)
    full = twins.mine.gather_full_optim_state_dict(twins.optimizer)
    assert (full is None) == (dear.rank() > 0)
    everywhere = twins.mine.gather_full_optim_state_dict(twins.optimizer, recipient_rank=None)
    for number, state in twins.reference.state_dict()["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(everywhere["state"][number][key], value, rtol=1e-9, atol=1e-10)
    full = dear.broadcast_object(full, root_rank=0)
    other = _Twins()
    other.mine.load_state_dict(twins.mine.state_dict())
    other.optimizer.load_state_dict(other.mine.get_shard_from_optim_state_dict(full))
    other.alone.load_state_dict(twins.alone.state_dict())
    other.reference.load_state_dict(twins.reference.state_dict())
    other.train(1)
    other.check()
    with pytest.raises(ValueError, match="not the optimizer that trains Bert"):
        other.mine.gather_full_optim_state_dict(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1))
    with pytest.raises(ValueError, match="has no 'state'"):
        other.mine.get_shard_from_optim_state_dict({})


def test_state_dicts_on_one_rank_and_device() -> None:
    twins = _Twins(state_dict_on_rank_0_only=True, state_dict_device=torch.device("meta"))
    twins.train(1)
    saved = twins.mine.state_dict()
    assert len(saved) == (len(twins.alone.state_dict()) if dear.rank() == 0 else 0)
    assert all(value.is_meta for value in saved.values())
    chunks = fsdp.sharded_state_dict(twins.mine, twins.optimizer)["model"]  # every rank has its share of checkpoints
    assert list(chunks) == list(twins.alone.state_dict())
    assert not any(value.is_meta for value in chunks.values())


@pytest.mark.parametrize("pickled", [False, True])
def test_copies_are_wrapped_and_train(pickled: bool) -> None:
    twins = _Twins()
    twins.train(1)
    with pytest.raises(RuntimeError, match="copied or pickled"):
        copy.deepcopy(twins.mine)
    with twins.mine.summon_full_params():
        other = copy.deepcopy(twins.mine) if not pickled else pickle.loads(pickle.dumps(twins.mine))
    assert isinstance(other.layers[0], FSDP)
    _same(other.state_dict(), twins.alone.state_dict())
    twins.mine = other
    twins.optimizer = Adam(other.parameters())
    twins.reference = Adam(twins.alone.parameters())
    twins.train(2)
    twins.check()


@pytest.mark.parametrize("whole", [False, True], ids=["in shares", "safetensors"])
def test_checkpoints_of_our_own(whole: bool, tmp_path: Path) -> None:
    path = dear.broadcast_object(str(tmp_path), root_rank=0)
    twins, other = _Twins(), _Twins(_by_size)
    twins.train(2)
    other.train(1)
    if whole:
        dear.save_pretrained(twins.mine, path)
        dear.load_pretrained(other.mine, path)
        other.alone.load_state_dict(twins.alone.state_dict())
    else:
        dear.save_checkpoint(path, twins.mine, twins.optimizer)
        dear.load_checkpoint(path, other.mine, other.optimizer)
        other.alone.load_state_dict(twins.alone.state_dict())
        other.reference.load_state_dict(twins.reference.state_dict())
        other.train(1)
    other.check()


def test_it_looks_like_the_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    model = FSDP(module, verbose=True, allow_reset_parameters=True)
    assert model.module is module
    assert model[0] is module[0]
    assert len(model) == 2
    assert "bucket_cap_mb=None" in repr(model)
    assert "bucket_cap_mb" not in repr(FSDP(torch.nn.ReLU()))
    assert model.append_shared_param(module[0].weight) is None  # type: ignore[func-returns-value]
    with pytest.raises(ValueError, match="no wrapper has this parameter"):
        model.append_shared_param(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(AttributeError, match="missing"):
        _ = model.missing
    line = FSDP(torch.nn.Linear(3, 3), allow_reset_parameters=True)
    before = line.weight.clone()
    line.reset_parameters()
    assert not torch.equal(line.weight, before)
    with pytest.raises(RuntimeError, match="allow_reset_parameters=True"):
        FSDP(torch.nn.Linear(3, 3)).reset_parameters()
    model.set_gradient_divide_factors(2.0, SIZE / 2, recursive=True)
    with pytest.raises(NotImplementedError, match="multiply the loss by"):
        model.set_gradient_divide_factors(2.0, SIZE, recursive=True)


# - What is refused


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fp32_reduce_scatter": True}, ValueError, "mixed_precision=True"),
        ({"force_input_to_fp32": True, "mixed_precision": True}, ValueError, "leave one of them out"),
        ({"compute_dtype": torch.float16}, ValueError, "give mixed_precision=True, or convert"),
        ({"buffer_dtype": torch.float16}, NotImplementedError, r"running_mean.*convert it before"),
        ({"compute_device": "cuda"}, NotImplementedError, "is on cpu: .* move the model"),
        ({"no_broadcast_optim_state": True}, NotImplementedError, "a model and an optimizer of their own"),
        ({"bucket_cap_mb": -1}, ValueError, "at least 0"),
        ({"bucket_cap_mb": "25"}, TypeError, "a number or None"),
        ({"gradient_predivide_factor": 0}, ValueError, "above 0"),
        ({"reshard_after_forward": "yes"}, TypeError, "True or False"),
        ({"process_group": 3}, TypeError, "one of torch.distributed's"),
        ({"process_group_reduce_scatter": 3}, TypeError, "a process group or None"),
        ({"mixed_precision": True}, NotImplementedError, r"'1' keeps statistics in torch.float32"),
        ({"reshard_after_foward": True}, TypeError, "is 'reshard_after_forward' meant"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        FSDP(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)), **options)


def test_wrappers_that_compute_otherwise_are_refused() -> None:
    inner = FSDP(torch.nn.Linear(3, 3))
    with pytest.raises(NotImplementedError, match=r"torch\.bfloat16 around it: give all wrappers of a model the same"):
        FSDP(torch.nn.Sequential(inner), mixed_precision=True, compute_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="takes a module"):
        FSDP(None)  # type: ignore[arg-type]


@pytest.mark.skipif(SIZE < 4, reason="needs two groups of two")
def test_process_groups() -> None:
    """Each half of the ranks has a model of its own."""
    halves = [torch.distributed.new_group([2 * half, 2 * half + 1]) for half in range(2)]
    half = dear.rank() // 2
    torch.default_generator.manual_seed(half)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)).double()
    alone = copy.deepcopy(plain)
    with enable_wrap(process_group=halves[half], process_group_reduce_scatter=halves[half]):
        plain[0] = wrap(plain[0])
        model: Any = wrap(plain)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    reference = torch.optim.SGD(alone.parameters(), 0.1)
    inputs = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(3):
        model(inputs[dear.rank()]).square().mean().backward()
        alone(inputs[2 * half : 2 * half + 2]).square().mean().backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    _same(model.state_dict(), alone.state_dict())
    mine, told = model.local_state_dict(), model.local_metadata_dict()
    weights, metadata = (dear.allgather_object(each)[2 * half : 2 * half + 2] for each in (mine, told))
    _same(FSDP.consolidate_shard_weights(weights, metadata), alone.state_dict())
    model.load_local_state_dict(mine)
    _same(model.state_dict(), alone.state_dict())
    with pytest.raises(ValueError, match="process_group_reduce_scatter has ranks"):
        FSDP(torch.nn.Linear(3, 3), halves[half], torch.distributed.group.WORLD)


# - Groups of hosts


def test_arguments_for_hosts() -> None:
    assert fsdp.gen_fsdp_args(nnodes=7, nproc_per_node=7, gsdp_type="none", model_type="bert-large") == {}
    found = fsdp.gen_fsdp_args(SIZE, 1, "group_sharding", "bert-large")
    assert found == {"mesh": dear.Mesh(hosts=SIZE, ranks=1)}
    assert fsdp.gen_fsdp_args(1, SIZE, "communication_with_groups", "bert-large") == {"two_level": SIZE}
    with pytest.raises(ValueError, match=f"give numbers whose product is {SIZE}"):
        fsdp.gen_fsdp_args(SIZE, 2, "group_sharding", "bert-large")


@pytest.mark.skipif(SIZE != 4, reason="two hosts of two ranks")
@pytest.mark.parametrize("gsdp_type", ["none", "group_sharding", "communication_with_groups"])
def test_groups_of_hosts_train_as_one_process(gsdp_type: str) -> None:
    """As the published example is written, on a small model."""
    fsdp_args = fsdp.gen_fsdp_args(nnodes=2, nproc_per_node=2, gsdp_type=gsdp_type, model_type="bert-large")
    torch.default_generator.manual_seed(3)
    plain = torch.nn.Sequential(*(torch.nn.Linear(12, 12) for _ in range(4))).double()
    alone = copy.deepcopy(plain)
    with enable_wrap(wrapper_cls=FSDP, **fsdp_args):
        policy = functools.partial(default_auto_wrap_policy, min_num_params=100)
        model: Any = auto_wrap(plain, auto_wrap_policy=policy)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
    reference = torch.optim.AdamW(alone.parameters(), 0.01)
    inputs = torch.randn(3, SIZE, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for step in range(3):
        model(inputs[step, dear.rank()]).square().mean().backward()
        alone(inputs[step]).square().mean().backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    saved = model.state_dict()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-11, atol=1e-12)
    engine = optimizer._engine
    assert engine.sharded.pieces_of(engine.order[0]) or dear.rank() > 0
    assert engine.unsharder._first.lanes[0].size == (2 if gsdp_type == "group_sharding" else 4)
    assert engine.round.comm.name.endswith("two_level") is (gsdp_type == "communication_with_groups")
