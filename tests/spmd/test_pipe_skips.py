"""Skip connections, and structures of tensors, from stage to stage: as in one process, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dear
import pipe

pytestmark = [pytest.mark.four_ranks, pytest.mark.usefixtures("sets_of_a_test")]


@pipe.skippable(stash=["early"])
class Encode(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> Any:
        yield pipe.stash("early", x)
        return self.layer(x).tanh()


@pipe.skippable(pop=["early"])
class Decode(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> Any:
        early = yield pipe.pop("early")
        return self.layer(x).tanh() * early


@pipe.skippable(pop=["early"], stash=["late"])
class Relay(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        early = yield pipe.pop("early")
        yield pipe.stash("late", None)
        return x + early


@pipe.skippable(pop=["late"])
class End(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        late = yield pipe.pop("late")
        assert late is None
        return x


def _dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def _u_net() -> nn.Sequential:
    """Two connections of one name, one within the other, and over stages that know of neither."""
    outer, inner = pipe.Namespace(), pipe.Namespace()
    return nn.Sequential(
        _dense(),
        Encode(6).isolate(outer),
        Encode(6).isolate(inner),
        _dense(),
        Decode(6).isolate(inner),
        _dense(),
        Decode(6).isolate(outer),
        _dense(),
    )


def _of_the_input() -> nn.Sequential:
    """The batch itself is stashed, which has no gradient, and popped by the last stage; and None is stashed."""
    return nn.Sequential(Encode(6), *(_dense() for _ in range(5)), Relay(), End())


class Widen(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": x, "more": [x * 2, (x.detach(), None, 3)], "rows": torch.arange(len(x))}


class Pass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, given: Any) -> Any:
        twice, (still, nothing, number) = given["more"]
        assert (nothing, number, still.requires_grad) == (None, 3, False)
        return {**given, "x": self.layer(given["x"] + still).tanh(), "more": [twice, (still, nothing, number)]}


class Look(nn.Module):
    """Looks rows up by numbers that come from another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6)

    def forward(self, given: Any) -> Any:
        return given["x"] * given["more"][0] + self.table(given["rows"]), given["x"].square().mean()


def _structures() -> nn.Sequential:
    return nn.Sequential(_dense(), Widen(), *(Pass() for _ in range(5)), Look())


class Turn(nn.Module):
    """Its output lies in columns, and so does its input's gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()


class Mean(nn.Module):
    """Its input's gradient has one row in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(0, keepdim=True).expand_as(x)


def _strided() -> nn.Sequential:
    return nn.Sequential(_dense(), Turn(), _dense(), _dense(), _dense(), Turn(), Mean(), Mean())


def _loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    if isinstance(output, tuple):  # of Look: the second is a number
        return (output[0] - target).square().mean() + output[1]
    return (output - target).square().mean()


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "u-net": _u_net,
    "input": _of_the_input,
    "structures": _structures,
    "strided": _strided,
}
BALANCES = {1: [8], 2: [3, 5], 4: [2, 2, 2, 2]}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_gradients_are_those_of_one_process(name: str, schedule: str, chunks: int) -> None:
    torch.manual_seed(3)
    plain = MODELS[name]()
    mesh = dear.Mesh(data=1, pipeline=-1)
    piped = pipe.Pipe(
        copy.deepcopy(plain), BALANCES[dear.size()], mesh=mesh, chunks=chunks, schedule=schedule, loss=_loss
    )
    theirs = dict(plain.named_parameters())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        rows = 4 * chunks if step < 2 else 4  # other shapes than before
        x, y = torch.randn(rows, 6, generator=generator), torch.randn(rows, 6, generator=generator)
        plain.zero_grad()
        piped.zero_grad()
        losses = [
            _loss(plain(part), wanted) / min(chunks, rows)
            for part, wanted in zip(x.chunk(chunks), y.chunk(chunks), strict=True)
        ]
        for loss in losses:
            loss.backward()
        found = piped.step(x, target=y)
        torch.testing.assert_close(found, torch.stack([loss.detach() for loss in losses]).sum())
        mine = {key.split(".", 2)[2]: each for key, each in piped.named_parameters()}
        for parameter, each in mine.items():
            assert each.grad is not None
            if name == "strided":  # what is sent lies in rows, for which other sums are computed
                torch.testing.assert_close(each.grad, theirs[parameter].grad)
            else:
                assert torch.equal(each.grad, theirs[parameter].grad), parameter


@pytest.mark.parametrize("name", ["u-net", "input"])
@pytest.mark.parametrize("strategy", ["dear", "wfbp", "fsdp"])
def test_training_equals_one_process(name: str, strategy: str) -> None:
    torch.manual_seed(3)
    plain = MODELS[name]().double()
    stages = min(2, dear.size())
    mesh = dear.Mesh(data=-1, pipeline=stages)
    piped = pipe.Pipe(copy.deepcopy(plain), BALANCES[stages], mesh=mesh, chunks=4, loss=_loss)
    theirs = torch.optim.AdamW(plain.parameters(), 0.01)
    ours = dear.DistributedOptimizer(
        torch.optim.AdamW(piped.parameters(), 0.01), piped, strategy=strategy, process_set=mesh.group("data")
    )
    shares, mine = mesh.size("data"), mesh.coordinate["data"]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(16, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        theirs.zero_grad()
        ours.zero_grad()
        _loss(plain(x), y).backward()
        piped.step(x.chunk(shares)[mine], target=y.chunk(shares)[mine])
        theirs.step()
        ours.step()
    saved = plain.state_dict()
    for key, value in piped.state_dict().items():
        torch.testing.assert_close(value, saved[key.split(".", 2)[2]], rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        output = piped(x)
    assert (output is None) == (mesh.coordinate["pipeline"] != stages - 1)
    if output is not None:
        torch.testing.assert_close(output, plain(x))


def test_an_output_of_any_structure_is_put_together() -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*(_dense() for _ in range(7)), Widen())
    piped = pipe.Pipe(copy.deepcopy(plain), BALANCES[dear.size()], mesh=dear.Mesh(data=1, pipeline=-1), chunks=2)
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = piped(x)
    assert (found is None) == (dear.rank() != dear.size() - 1)
    if found is not None:
        wanted = [plain(part) for part in x.chunk(2)]
        assert torch.equal(found["more"][0], torch.cat([each["more"][0] for each in wanted]))
        assert found["more"][1][1:] == (None, 3)
        assert found["rows"].tolist() == [0, 1, 2, 0, 1, 2]


def test_what_is_no_tensor_is_alike_in_all_micro_batches() -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, float(x.detach()[0, 0])

    class First(nn.Module):
        def forward(self, given: Any) -> Any:
            return given[0]

    layers = [_dense(), Rows(), First(), *(_dense() for _ in range(5))]
    balance = {1: [8], 2: [2, 6], 4: [2, 2, 2, 2]}[dear.size()]
    piped = pipe.Pipe(nn.Sequential(*layers), balance, mesh=dear.Mesh(data=1, pipeline=-1), chunks=2, loss=_loss)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    if dear.size() == 1:
        piped.step(x, target=x)
        return
    with pytest.raises(RuntimeError, match=r"the same structure|failed to run forward"):
        piped.step(x, target=x)
    with pytest.raises(
        RuntimeError, match=r"has ended with an error: rank 0 failed in forward of .* the same structure"
    ):
        piped.step(x, target=x)


def test_connections_that_do_not_fit_are_told_on_every_rank() -> None:
    mesh = dear.Mesh(data=1, pipeline=-1)
    with pytest.raises(TypeError, match="layer '0' stashes 'early', which no layer pops"):
        pipe.Pipe(nn.Sequential(Encode(6), *(_dense() for _ in range(7))), BALANCES[dear.size()], mesh=mesh)


def test_connections_are_explained() -> None:
    mesh = dear.Mesh(data=1, pipeline=-1)
    piped = pipe.Pipe(_u_net(), BALANCES[dear.size()], mesh=mesh, chunks=2, loss=_loss)
    x = torch.randn(4, 6)
    for _ in range(3):
        piped.step(x, target=x)
    found = {1: [""], 2: ["0 arrive, 2 leave, of stage 0", "2 arrive, 0 leave, of stage 1"]}
    found[4] = [f"{n} arrive, {m} leave, of stage {k}" for k, (n, m) in enumerate([(0, 1), (1, 2), (2, 1), (1, 0)])]
    assert found[dear.size()][dear.rank()] in piped.explain()
