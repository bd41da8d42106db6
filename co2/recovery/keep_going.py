"""``keep_going``, around a training function: it goes on without ranks that are lost, and with those that come back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from co2.optimizer import Co2Optimizer
from co2.part import as_real, outer_dtype
from co2.recovery.inheritance import Left, bequeath, left_by
from comm_core import TransportError
from overlap.elastic import State, stop_request
from overlap.elastic.state import ObjectState
from overlap.horovod.controller.errors import HorovodInternalError
from overlap.horovod.job import regroup
from overlap.job.regrouping import RanksChange, ranks_change
from overlap.job.session import Session, current
from overlap.transport.broadcast import overwrite
from overlap.transport.objects import allgather_object
from overlap.transport.operation import all_reduce, barrier
from overlap.transport.peer_queries import NoAnswer

__all__ = ["keep_going"]

R = TypeVar("R")
log = logging.getLogger("dear")


class _Outcome(NamedTuple):
    """Of a call of the function: what it returned, or that ranks have changed."""

    result: Any = None
    again: bool = False


@dataclass
class _BroughtAlong:
    """What this rank brings along where ranks change."""

    has_state: bool = False  # that of training, from its beginning or from the others
    left: list[Left] = field(default_factory=list)  # of the outer state, optimizer by optimizer


def keep_going(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function whose first argument is a state, such as ``co2.elastic.TorchState``. On every rank.

    The function is called, and called again whenever a rank was lost or one has come back, with the ranks that there are
    then. Before each call ``state.sync()`` gives all ranks what the first of those that go on has; of models in the state,
    parameters become the mean of what those that go on have. So the function wraps the optimizer, and begins where the
    state says. What was on its way is dropped, which is at most one round; of the outer momentum, the shards of lost
    ranks. Callbacks that are registered with the state are called, too. Where nobody goes on, as at the beginning, the last
    ``state.commit()`` is taken up, or what rank 0 has. When the function returns, commits are removed.

    It needs a job that is launched so: ``dearrun --restarts``, or an agent of torchrun's for each worker, with
    ``DEAR_KEEP_GOING=1``. In another one the function is called once, and a lost rank ends the job.

    An error that has nothing to do with ranks goes on, and its rank is lost to the others.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        if not isinstance(state, State):
            raise TypeError(f"the first argument should be an elastic State and is {type(state).__name__}")
        session = current()
        with stop_request.heeded():
            return _train(session, functools.partial(func, state, *args, **kwargs), state)

    return wrapper


def _train(session: Session, func: Callable[[], R], state: State) -> R:
    if session.roster is None:
        if session.comm.size > 1 and session.comm.rank == 0:
            log.warning(
                "a rank that is lost ends this job: keep_going needs 'dearrun --restarts N', or DEAR_KEEP_GOING=1 and "
                "an agent of torchrun's for each worker"
            )
        _take_up(state)
        alone = func()
        state.finished()
        return alone
    mine = _BroughtAlong()
    while True:
        outcome = _call(session, mine, func, state)
        if not outcome.again:
            result: R = outcome.result
            return result
        session = _go_on()
        assert session.roster is not None
        if not session.roster.stayed:
            mine = _BroughtAlong()


def _take_up(state: State) -> None:
    """Where no rank goes on: the last commit, or what rank 0 has."""
    if not state.resume():
        state.sync()


def _call(session: Session, mine: _BroughtAlong, func: Callable[[], Any], state: State) -> _Outcome:
    assert session.roster is not None
    try:
        _begin(session, mine, state)
        result = func()
        session.control.run(barrier(label="keep_going: all have returned"))
    except RuntimeError as error:
        known = session.roster.news
        if not known and not (_is_of_ranks(error) and (isinstance(error, RanksChange) or ranks_change())):
            raise
        log.warning("rank %d of %d: %s", session.comm.rank, session.comm.size, session.roster.news or error)
        if not _is_of_ranks(error):
            log.warning("rank %d of %d: this error is passed over", session.comm.rank, session.comm.size, exc_info=True)
        session.tear_down()
        optimizers = [each for each in session.registry.optimizers if isinstance(each, Co2Optimizer)]
        mine.left = left_by([optimizer.rounds for optimizer in optimizers], mine.left)
        return _Outcome(again=True)
    try:
        state.finished()
    except RuntimeError as error:  # all have returned, and one was lost meanwhile
        log.warning("commits may be left: %s", error)
    return _Outcome(result)


def _is_of_ranks(error: BaseException) -> bool:
    """Whether it may come of ranks that are lost: one of a transport, ours or torch's."""
    return isinstance(error, (RanksChange, TransportError, HorovodInternalError, NoAnswer)) or "gloo" in str(error)


def _go_on() -> Session:
    """With those that are left."""
    session = regroup()
    assert session.roster is not None
    how = "" if session.roster.stayed else ", where others are"
    log.warning("rank %d of %d goes on%s", session.comm.rank, session.comm.size, how)
    return session


def _begin(session: Session, mine: _BroughtAlong, state: State) -> None:
    """All ranks have the state of the first of those that go on, and the mean of all of theirs as parameters."""
    session.late = False
    going_on = sum(allgather_object(session.control, mine.has_state))
    if not going_on:
        _take_up(state)
    else:
        params = [param for module in _modules(state) for param in module.parameters() if _is_averaged(param)]
        ended = [as_real(param).to("cpu", outer_dtype(param.dtype)) / going_on for param in params]
        state.sync()
        bequeath(session, mine.left)
        for param, part in zip(params, ended, strict=True):
            mean = part if mine.has_state else torch.zeros_like(part)
            session.comm.run(all_reduce(mean, mean, label="keep_going: parameters"))
            overwrite(as_real(param), mean)
        state.on_reset()
    session.control.run(barrier(label="keep_going: all have the state"))
    mine.has_state = True


def _is_averaged(param: torch.Tensor) -> bool:
    return param.is_floating_point() or param.is_complex()


def _modules(state: State) -> list[torch.nn.Module]:
    values = state.attributes().values() if isinstance(state, ObjectState) else ()
    return [value for value in values if isinstance(value, torch.nn.Module)]
