"""What co2 saves and loads when ranks are not at the same point of a round."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import co2
from overlap.job.session import current
from tests.spmd.co2_training import (
    DOUBLE,
    FULL,
    Resumed,
    adamw,
    equal_everywhere,
    loss_of,
    momentum_sgd,
    resumes,
    small_model,
    train_steps,
    wrapped,
)

STREAMING = {"outer": "streaming-diloco", "outer_lr": 0.6, "outer_momentum": 0.8, "fragments": 2, "overlap_steps": 2}
# How models are wrapped, after how many steps they are saved, and what is then saved of each parameter.
RESUMED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any], list[int], set[str]]] = {
    "co2": (adamw, {"outer_frequency": 3, **FULL}, [5, 6, 7], {"start", "next", "momentum"}),
    **{
        rule: (adamw, {"outer": rule, "outer_frequency": 3}, [7], set())
        for rule in ("localsgd", "slowmo", "diloco", "eager")
    },
    # It sends after 2, 5, 7 and 10 steps, and applies after 4, 7 and 9.
    "streaming": (adamw, {**STREAMING, "outer_frequency": 5}, [4, 5, 6, 7], set()),
    "streaming in 4 bits": (adamw, {**STREAMING, "outer_frequency": 5, "bits": 4}, [4, 5, 6, 7], set()),
    "sparse": (
        *(adamw, {"outer": "sparseloco", "outer_frequency": 3, "outer_lr": 0.9, "top_k": 300}),
        *([4, 6, 7], {"start", "residual"}),
    ),
    "acco": (adamw, {"outer": "acco", "outer_frequency": 2}, [1, 2, 3, 4, 6], set()),
    "acco with momentum": (momentum_sgd, {"outer": "acco", "outer_frequency": 2}, [1, 4], set()),
}


def _on_rank_0_first(act: Callable[[], Any]) -> Any:
    """What `act` returns on rank 0; the others wait, their main threads doing nothing, and do not call it."""
    gate, peer_queries = threading.Event(), current().peer_queries
    peer_queries.on("test/gate", lambda _sender, _news: gate.set())
    co2.barrier()
    result = None
    if co2.rank() == 0:
        result = act()
        for rank in range(1, co2.size()):
            peer_queries.tell(rank, "test/gate")
    elif not gate.wait(30):
        raise AssertionError("rank 0 waits for this one")
    return result


def _same_sections(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if key != "parameters":
            assert value == other[key], key
    assert one["parameters"].keys() == other["parameters"].keys()
    for index, vectors in one["parameters"].items():
        assert vectors.keys() == other["parameters"][index].keys()
        for name, values in vectors.items():
            assert torch.equal(values, other["parameters"][index][name]), (index, name)


@pytest.mark.parametrize(
    ("rule", "steps"), [(rule, steps) for rule, (_, _, saved_after, _) in RESUMED.items() for steps in saved_after]
)
def test_resumes_bit_for_bit_wherever_it_was_saved(rule: str, steps: int) -> None:
    """In an optimizer that has trained something else, with a round on its way."""
    make, options, _, names = RESUMED[rule]

    def same_state(loaded: Resumed) -> None:
        state = loaded.optimizer.state_dict()
        _same_sections(state["co2"], loaded.saved["co2"])
        assert str(state["state"]) == str(loaded.saved["state"])

    model, optimizer = wrapped(make, **options)
    train_steps(model, optimizer, range(steps))
    saved, _, _ = resumes(
        lambda: wrapped(make, **options), (model, optimizer), range(steps, 13), range(4), loaded=same_state
    )
    assert all(names in (set(), set(one)) for one in saved["co2"]["parameters"].values())
    outer = options.get("outer", "co2")
    if outer != "co2":
        _, another = wrapped(make, outer_frequency=3)
        with pytest.raises(ValueError, match=f"was saved with outer='{outer}', and this optimizer has outer='co2'"):
            another.load_state_dict(saved)


def test_whoever_saves_before_others_have_begun_saves_the_same() -> None:
    """Before anybody's second step, and with parameters added in the middle."""
    model, optimizer = wrapped(outer_frequency=2, **FULL)

    def step_and_save() -> dict[str, Any]:
        train_steps(model, optimizer, range(1))
        return optimizer.state_dict()["co2"]

    early = _on_rank_0_first(step_and_save)
    if co2.rank() > 0:
        train_steps(model, optimizer, range(1))
    co2.barrier()
    if early is not None:
        _same_sections(early, optimizer.state_dict()["co2"])
        for value, vectors in zip(small_model().parameters(), early["parameters"].values(), strict=True):
            assert torch.equal(vectors["start"], value)
            assert torch.equal(vectors["next"], value)
            assert not vectors["momentum"].any()

    extra = nn.Parameter(torch.full((37,), 2.5, dtype=DOUBLE))
    train_steps(model, optimizer, range(1, 3))
    optimizer.add_param_group({"params": [extra]})

    def step_with_it_and_save() -> dict[str, Any]:
        optimizer.zero_grad()
        (loss_of(model, co2.rank(), 3) + extra.sum() * 0).backward()
        optimizer.rounds.begin()  # as step() does, which goes on to send the round
        return optimizer.state_dict()["co2"]

    early = _on_rank_0_first(step_with_it_and_save)
    if early is not None:
        assert early["parameters"][4]["start"].tolist() == [2.5] * 37
    optimizer.zero_grad()
    (loss_of(model, co2.rank(), 3) + extra.sum() * 0).backward()
    optimizer.step()


def test_a_share_that_is_missing_is_no_zero() -> None:
    model, optimizer = wrapped(outer_frequency=1, **FULL)
    train_steps(model, optimizer, range(2))
    optimizer.rounds.arrive()
    rounds, size = optimizer.rounds, co2.size()
    answer = rounds._shares
    rounds._shares = lambda *, passed: {} if co2.rank() == size - 1 else answer(passed=passed)
    co2.barrier()
    with pytest.raises(RuntimeError, match=r"of parameter '.*', \d+ of \d+ elements are on the ranks"):
        optimizer.state_dict()
    co2.barrier()


def test_rank_0_loads_and_everybody_else_is_broadcast_to() -> None:
    """Horovod's recipe, in a job that has not made a step."""
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    train_steps(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, resumed = wrapped(outer_frequency=2, **FULL)
    if co2.rank() == 0:
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
    co2.broadcast_parameters(other.state_dict(), root_rank=0)
    co2.broadcast_optimizer_state(resumed, root_rank=0)
    first = co2.broadcast_object(saved[1]["co2"], 0)
    _same_sections(resumed.state_dict()["co2"], first)
    assert equal_everywhere(other)
    train_steps(other, resumed, range(5, 9))
    if co2.rank() == 0:
        resumed.state_dict()


@pytest.mark.parametrize("load", [True, False])
def test_whoever_saves_while_others_have_not_loaded_gets_what_it_has_itself(load: bool) -> None:
    """And those who have loaded, perhaps twice, go on answering with what they had, also after the step that follows.

    With that alone: when they come to an event of the same number, they answer with what they have then.
    """
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    train_steps(model, optimizer, range(5))
    saved = copy.deepcopy(optimizer.state_dict())
    train_steps(model, optimizer, range(5, 10))
    between = optimizer.state_dict()["co2"]
    state = saved if load else {**saved, "co2": None}

    def load_and_save() -> dict[str, Any]:
        for _ in range(2):
            optimizer.load_state_dict(state)
        return optimizer.state_dict()["co2"]

    loaded = _on_rank_0_first(load_and_save)
    if co2.rank() == 0:
        if load:
            _same_sections(loaded, saved["co2"])
        else:
            assert (loaded["parameters"], loaded["steps"]) == ({}, 0)
        train_steps(
            model, optimizer, range(10, 12)
        )  # until a round is sent, which the others send after they have loaded
    else:
        _same_sections(optimizer.state_dict()["co2"], between)
        load_and_save()
        train_steps(model, optimizer, range(10, 12))
    for events in (optimizer.rounds.events, between["events"]):
        while optimizer.rounds.events < events:
            train_steps(model, optimizer, range(12, 13))
        after = co2.allgather_object(optimizer.state_dict()["co2"])
        _same_sections(after[0], after[-1])


def test_a_question_that_cannot_be_answered_yet_holds_up_no_other() -> None:
    _, optimizer = wrapped(outer_frequency=2, **FULL)
    rounds, peer_queries = optimizer.rounds, current().peer_queries
    peer_queries.on("test/other", lambda _sender, question: question + 1)
    co2.barrier()
    if co2.rank() == 0 and co2.size() > 1:
        early = peer_queries.ask(1, rounds.following.topic, 7)
        assert peer_queries.ask(1, "test/other", 1).result(30) == 2
        assert early.result(30) is None
    co2.barrier()
