"""Tunes a strategy while it trains: times steps, lets rank 0 decide, and changes buckets on all ranks at one step.

Every rank counts the same steps, so all of them come to the end of a window together. There, and nowhere else, rank 0's
decision travels; whether the search is over is part of it. No rank acts on a time of its own. Each process set is tuned by
itself: rank 0 is the first of the optimizer's set.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overlap.job.groups import beside
from overlap.job.process_set import ProcessSet
from overlap.job.session import Session, current
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.plan.link_probe import link_cost
from overlap.plan.tuning import bayes, store
from overlap.plan.tuning.campaign import Campaign, Decision, Result, table
from overlap.plan.tuning.options import Tuning
from overlap.plan.tuning.space import Dimension, Setting, bounded, describe
from overlap.plan.tuning.window import StepWindow
from overlap.transport.communicator import Communicator
from overlap.transport.objects import agree

__all__ = ["Trial", "tune"]

log = logging.getLogger("dear")


class Trial:
    """The :class:`.Study` of one search, called after each step of its optimizer until the search is over.

    Steps of another one do not count: the hook stays with the wrapped optimizer, which may be wrapped again.
    """

    def __init__(
        self,
        comm: Communicator,
        dimensions: tuple[Dimension, ...],
        options: Tuning,
        place: store.Place | None,
        ready: Callable[[], bool],
    ) -> None:
        self.result: Result | None = None
        self._comm, self._options, self._place = comm, options, place
        self._dimensions = dimensions
        self._campaign: Campaign | None = None  # rank 0's; the others follow
        self._window: StepWindow | None = None
        self._ready = ready
        self._mine: weakref.ref[DistributedOptimizer] | None = None

    def attach(self, optimizer: DistributedOptimizer) -> None:
        """Begin with `optimizer`'s next step."""
        self._mine = weakref.ref(optimizer)
        optimizer._study(self)

    @property
    def under_way(self) -> bool:
        return self.result is None

    def __call__(self, optimizer: DistributedOptimizer, _args: Any, _kwargs: Any) -> None:
        """A step of `optimizer` ended. On every rank."""
        if self.result is not None or self._mine is None or self._mine() is not optimizer:
            return
        if self._window is None:
            if self._ready():
                self._begin(optimizer)
            return
        seconds = self._window.tick(time.perf_counter())
        if seconds is None:
            return
        decision = agree(self._comm, None if self._campaign is None else self._campaign.next(seconds))
        assert decision is not None, "rank 0 has a campaign"
        self._follow(optimizer, decision)

    def _begin(self, optimizer: DistributedOptimizer) -> None:
        strategy = optimizer.strategy
        if self._comm.rank == 0:
            self._campaign = Campaign(
                bayes.BayesianSearch(self._dimensions, seed=self._options.seed),
                strategy.setting,
                trials=self._options.trials,
                pairs=self._options.pairs,
                same=lambda setting: (optimizer.preview(strategy.at(setting)), strategy.at(setting).conduct),
            )
        self._open_window()

    def _open_window(self) -> None:
        self._window = StepWindow(self._options.warmup, self._options.window, time.perf_counter())

    def _follow(self, optimizer: DistributedOptimizer, decision: Decision) -> None:
        if dict(decision.setting) != dict(optimizer.strategy.setting):
            optimizer._replan(optimizer.strategy.at(decision.setting))
        if decision.result is None:
            self._open_window()
            return
        self.result = decision.result
        if self._campaign is not None:
            self._tell(optimizer.strategy.name, self._campaign, decision.result)
            self._campaign = None

    def _tell(self, name: str, campaign: Campaign, result: Result) -> None:
        log.info("%s: tuned in %d measurements\n%s", name, len(campaign.log), table(campaign.log, result))
        if self._place is None or self._options.path is None:
            return
        try:
            store.save(Path(self._options.path), self._place, result)
        except (OSError, ValueError) as error:  # the search was not in vain: its result is in force
            log.warning("the result of tuning could not be saved: %s", error)


def tune(
    optimizer: DistributedOptimizer,
    options: bool | Tuning,
    process_set: ProcessSet,
    *,
    ready: Callable[[], bool] = lambda: True,
) -> None:
    """Tune `optimizer`'s strategy while it trains, once it is `ready`, on all ranks alike; nothing to do for False.

    `process_set` is the optimizer's, and tuned by itself. On every rank of the job, before the first step. With a `path` in
    `options`, a result found there is taken over instead.
    Raises ``ValueError`` for a strategy that has nothing to tune, bounds of something else, and a file that holds no
    results; ``ImportError`` where rank 0 lacks the ``bayesian-optimization`` package.
    """
    session = current()
    chosen: bool | Tuning = agree(session.comm, options)
    if not isinstance(chosen, bool | Tuning):
        raise TypeError(f"tune should be True, False or a Tuning and is {chosen!r}")
    if chosen is False:
        return
    options = Tuning() if chosen is True else chosen
    strategy = optimizer.strategy
    if not strategy.space:
        raise ValueError(f"strategy {strategy.name!r} as it was chosen has nothing to tune; leave tune=False")
    dimensions = bounded(strategy.space, options.bounds)
    comm = beside(session, process_set)
    place = None if options.path is None else _place(session, optimizer, comm.size)
    found, problem = agree(comm, _look_up(options, place) if comm.rank == 0 else (None, None))
    if problem is not None:
        raise problem
    trial = Trial(comm, dimensions, options, place, ready)
    if found is None:
        trial.attach(optimizer)
    else:
        optimizer._replan(strategy.at(found))
        if comm.rank == 0:
            log.info("%s: %s, tuned earlier (%s)", strategy.name, describe(found), options.path)


def _look_up(options: Tuning, place: store.Place | None) -> tuple[Setting | None, Exception | None]:
    """What rank 0 finds, or what every rank has to raise."""
    try:
        if place is not None and options.path is not None:
            path = Path(options.path)
            if not path.parent.is_dir():
                raise ValueError(f"results of tuning cannot be saved in {path}: there is no folder {path.parent}")
            found = store.load(path, place)
            if found is not None:
                return found, None
        if not bayes.available():
            raise ImportError("tune=True needs the bayesian-optimization package: pip install bayesian-optimization")
    except (ImportError, OSError, ValueError) as error:
        return None, error
    return None, None


def _place(session: Session, optimizer: DistributedOptimizer, ranks: int) -> store.Place:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    lines = [f"{tuple(param.shape)} {param.dtype} {param.requires_grad}" for param in params]
    return store.Place(
        strategy=optimizer.strategy.name,
        model=store.signature(lines),
        nbytes=sum(param.numel() * param.element_size() for param in params if param.requires_grad),
        ranks=ranks,
        hosts=session.cross_size,
        backend=session.comm.backend,
        link=link_cost(session.comm),
    )
