"""What cannot go on once some ranks have joined is refused on all of them."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear
from overlap.features.join import CannotJoin, joined_ranks_of
from overlap.job.session import current
from overlap.transport.objects import SignatureMismatch
from tests.spmd.loops import Run
from tests.spmd.training import assert_close
from tests.spmd.uneven_training import backward_of, end_of_a_failed_join, two_runs


def _refused(
    run: Run, joined: bool, message: str, act: Callable[[], Any], meanwhile: Callable[[], Any] = dear.barrier
) -> None:
    """On a rank that has joined join() raises; on the others `act` does; and then, on all, whatever is done `meanwhile`."""
    if dear.size() > 1:
        with pytest.raises(CannotJoin, match=message):
            dear.join() if joined else act()
        end_of_a_failed_join(meanwhile)


@pytest.mark.parametrize("strategy", ["dear", "dear-whole", "oss", "wfbp"])
@pytest.mark.parametrize("left_over", ["reduced", "accumulated"])
@pytest.mark.parametrize("step", ["meanwhile", "before", "after"])
def test_gradients_that_nobody_stepped_are_refused_on_all_ranks(step: str, left_over: str, strategy: str) -> None:
    """The others' `step` begins before they hear that a rank has joined, or after."""
    run, last = two_runs(strategy)[0], dear.size() - 1
    joined = dear.rank() == last
    backward_of(run, run.batch(0))
    run.optimizer.step()
    run.optimizer.zero_grad()
    with run.optimizer.no_sync() if joined and left_over == "accumulated" else contextlib.nullcontext():
        backward_of(run, run.batch(1))

    if joined and step == "before":
        time.sleep(0.1)

    def go_on() -> None:
        while step == "after" and not joined_ranks_of(current()).joined_now:
            time.sleep(0.001)
        run.optimizer.step()
        backward_of(run, run.batch(2))  # where all was issued in backward, it is the next step that is not possible
        run.optimizer.step()

    _refused(run, joined, rf"rank {last} has called join.*there.*step\(\) or zero_grad\(\) before join", go_on)


@pytest.mark.parametrize("what", ["replan", "add_param_group", "load_state_dict"])
def test_what_joined_ranks_cannot_follow_is_refused_on_all_ranks(what: str) -> None:
    run = two_runs("dear")[0]
    joined = dear.rank() == 0 and dear.size() > 1
    state: dict[str, Any] = {}
    backward_of(run, run.batch(0))
    run.optimizer.step()
    if not joined:
        run.optimizer.zero_grad()
        backward_of(run, run.batch(1))
        if dear.size() > 1 and what == "load_state_dict":
            run.optimizer.step()  # after it, all ranks know
            state = {"param_groups": [], "state": {}}
        else:
            run.optimizer.zero_grad()
    argument = {
        "replan": run.optimizer.strategy,
        "add_param_group": {"params": [torch.nn.Parameter(torch.zeros(3))]},
        "load_state_dict": state,
    }[what]
    message = rf"{what}\(\) needs every rank, and ranks \[0\] have joined"
    _refused(run, joined, message, lambda: getattr(run.optimizer, what)(argument))


@pytest.mark.parametrize("strategy", ["dear", "wfbp", "bytescheduler"])
def test_who_catches_that_a_join_has_failed_cannot_train_before_all_have_joined(strategy: str) -> None:
    run, joined = two_runs(strategy)[0], dear.rank() == dear.size() - 1
    backward_of(run, run.batch(0))
    run.optimizer.step()
    state = run.optimizer.state_dict()

    def load() -> None:
        while not joined_ranks_of(current()).joined_now:
            time.sleep(0.001)
        run.optimizer.load_state_dict(state)

    def one_more_step() -> None:
        backward_of(run, run.batch(1))
        run.optimizer.step()

    _refused(run, joined, r"load_state_dict\(\) needs every rank", load, one_more_step)
    follower, _ = two_runs(strategy)
    backward_of(follower, follower.batch(0))
    follower.optimizer.step()
    follower.optimizer.synchronize()
    for parameter in follower.model.parameters():
        everywhere = dear.allgather(parameter.detach().unsqueeze(0))
        assert all(torch.equal(one, parameter) for one in everywhere)


def test_batch_norm_over_all_ranks_cannot_go_on() -> None:
    layer = dear.SyncBatchNorm(3)
    joined = dear.rank() == 0 and dear.size() > 1
    if dear.size() > 1 and not joined:
        while not joined_ranks_of(current()).joined_now:
            time.sleep(0.001)
    run = Run(layer, None, None, dear.size())
    _refused(run, joined, "SyncBatchNorm while training needs every rank", lambda: layer(torch.ones(4, 3)))


@pytest.mark.parametrize("strategy", ["dear", "wfbp", "bytescheduler"])
def test_a_conversion_needs_those_who_have_joined(strategy: str) -> None:
    run, last = two_runs(strategy)[0], dear.size() - 1
    backward_of(run, run.batch(0))
    run.optimizer.step()
    run.optimizer.zero_grad()

    def go_on() -> None:
        run.model.float()
        x, y = run.batch(1)
        backward_of(run, (x.float(), y.float()))
        run.optimizer.step()

    message = rf"converted on ranks \[0.*\], which every rank has to do, and ranks \[{last}\] have joined"
    _refused(run, dear.rank() == last, message, go_on)


def _refused_a_join(run: Run, last: bool) -> None:
    if last:
        backward_of(run, run.batch(1))

    def go_on() -> None:
        for _ in range(2):
            backward_of(run, run.batch(1))
            run.optimizer.step()

    _refused(run, last, "has called join", go_on)


def _refused_a_conversion(run: Run, last: bool) -> None:
    x, y = run.batch(1)
    if last and dear.size() > 1:
        run.model.float()
        x, y = x.float(), y.float()
    with pytest.raises(SignatureMismatch) if dear.size() > 1 else contextlib.nullcontext():
        backward_of(run, (x, y))
        run.optimizer.step()
        run.optimizer.synchronize()


@pytest.mark.parametrize("collects", [0, 1])
@pytest.mark.parametrize("refused", [_refused_a_join, _refused_a_conversion])
def test_an_optimizer_that_could_not_go_on_is_no_part_of_what_follows(
    refused: Callable[[Run, bool], None], collects: int
) -> None:
    """Python collects what was dropped when it likes, on each rank. Nobody is absent from the next one's averages."""
    run = two_runs("dear")[0]
    backward_of(run, run.batch(0))
    run.optimizer.step()
    run.optimizer.zero_grad()
    refused(run, dear.rank() == dear.size() - 1)
    kept = [run]
    del run
    if dear.rank() % 2 == collects:
        kept.clear()
        gc.collect()
    assert 0 <= dear.join() < dear.size()
    follower, expected = two_runs("dear")[0], two_runs("")[0]
    for trained in (follower, expected):
        for number in range(2):
            backward_of(trained, trained.batch(number))
            trained.optimizer.step()
            trained.optimizer.zero_grad()
    assert 0 <= dear.join() < dear.size()
    assert_close(follower.model.state_dict(), expected.model.state_dict(), "follower")
    assert_close(follower.optimizer.state_dict(), expected.optimizer.state_dict(), "its optimizer")
