"""Bayesian optimisation by ask and tell: a Gaussian process over measurements, and expected improvement.

Knows no communicator and no clock. It runs on rank 0 alone.
"""

from __future__ import annotations

import importlib.util
import math
import random
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from overlap.plan.tuning.space import Dimension, Setting, from_unit, to_unit

__all__ = ["BayesianSearch", "available"]

_NOISE = 0.05  # variance of one measurement, in units of the variance of all of them
_SMOOTH = (0.1, 2.0)  # how far, on the scale from 0 to 1, times of settings have to do with each other
_CANDIDATES = 1000
_MARGIN = 0.01  # an improvement counts from this many standard deviations on


def available() -> bool:
    """Whether the ``bayesian-optimization`` package is installed."""
    return importlib.util.find_spec("bayes_opt") is not None


class BayesianSearch:
    """A search that proposes settings by a Gaussian process.

    The first few spread evenly over the space, the others are where most improvement is expected.

    The logarithm of the time is what is modelled, so that a saving of 10 % counts the same everywhere. The random state
    of numpy and Python is not touched. Raises ``ImportError`` without the ``bayesian-optimization`` package.
    """

    def __init__(self, dimensions: Sequence[Dimension], *, seed: int = 0) -> None:
        if not dimensions:
            raise ValueError("a search needs at least one dimension and got none")
        if not available():
            raise ImportError("tuning needs the bayesian-optimization package: pip install bayesian-optimization")
        state = random.getstate()  # from which packages draw names of files while they are imported
        from bayes_opt import BayesianOptimization, acquisition
        from sklearn.gaussian_process.kernels import Matern

        random.setstate(state)
        self._dimensions = tuple(dimensions)
        self._seeds = 2 + len(self._dimensions)
        self._asked = 0
        acquire: Any = acquisition.ExpectedImprovement(xi=_MARGIN)
        # A buffer size needs no ten digits: the best of many candidates, without descending from each of them.
        acquire.suggest = partial(acquire.suggest, n_random=_CANDIDATES, n_smart=0)
        self._optimization: Any = BayesianOptimization(
            f=None,
            pbounds={one.name: (0.0, 1.0) for one in self._dimensions},
            acquisition_function=acquire,
            random_state=seed,
            verbose=0,
            allow_duplicate_points=True,
        )
        kernel = Matern(length_scale=0.3, length_scale_bounds=_SMOOTH, nu=2.5)
        self._optimization.set_gp_params(kernel=kernel, alpha=_NOISE, n_restarts_optimizer=1)

    def ask(self) -> dict[str, float]:
        """The next setting to measure."""
        self._asked += 1
        if self._asked <= self._seeds:
            return from_unit(self._dimensions, _spread(self._dimensions, self._asked))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a fit that stopped at a bound: the next one has more data
            return from_unit(self._dimensions, {name: float(at) for name, at in self._optimization.suggest().items()})

    def tell(self, setting: Setting, seconds: float) -> None:
        """Note that a step with `setting` took so many seconds.

        Raises ``ValueError`` for a time that is not above 0.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(f"a step should take some time, and {dict(setting)} is said to take {seconds} seconds")
        self._optimization.register(to_unit(self._dimensions, setting), -math.log(seconds))


def _spread(dimensions: Sequence[Dimension], number: int) -> dict[str, float]:
    """The `number`-th point, from 1, of a sequence that fills the unit cube evenly (Roberts' R sequence)."""
    root = 2.0
    for _ in range(30):  # x^(d+1) = x + 1, the golden ratio's relative
        root = (1 + root) ** (1 / (len(dimensions) + 1))
    return {one.name: (0.5 + number * root ** -(axis + 1)) % 1.0 for axis, one in enumerate(dimensions)}
