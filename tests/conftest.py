"""What all tests share: conditions for markers, poisoned parameters, and what the end of a run tells.

That is the table of multi-rank suites, and which tests did not run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import pytest

from tests import forkserver
from tests.skipped import table
from tests.tiers import (
    FOUR,
    OF_THE_BACKEND,
    OVER_MPI,
    OVER_TCP,
    STRATEGY,
    TWO,
    Tier,
    is_beside,
    is_known,
    jobs_of,
    strategies_of,
)

# A missed wait then shows as NaN instead of as an old value.
os.environ.setdefault("DEAR_POISON", "1")
# torch's store looks up the name of whoever connects to it: without an answer, each time for five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# These suites run inside every rank of a job that tests/test_spmd.py starts.
if "DEAR_SPMD_SUITE" not in os.environ:
    collect_ignore = ["backend", "comm_core", "spmd"]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


_ENVIRON = pytest.StashKey[dict[str, str]]()
CONDITIONS = {
    "needs_root": (lambda: os.geteuid() == 0, "needs root"),
    "needs_gpu": (_has_gpu, "needs a CUDA device"),
    "needs_horovod": (lambda: importlib.util.find_spec("horovod") is not None, "needs Horovod"),
    "slow": (lambda: os.environ.get("DEAR_SLOW_TESTS") in ("1", "only"), "slow; make test-slow runs it"),
}


def pytest_configure(config: pytest.Config) -> None:
    """The first process of a run has the servers that fork its jobs, and those of the processes that it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it starts with `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs that tests interrupt would ignore it, too
    if not os.environ.get(forkserver.VARIABLE):
        stack = contextlib.ExitStack()
        stack.enter_context(forkserver.listening())
        config.add_cleanup(stack.close)
    config.stash[_ENVIRON] = dict(os.environ)


@pytest.fixture(autouse=True)
def _real_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("real_start") is not None:
        real = forkserver.environment(os.environ, real_start=True)
        monkeypatch.setenv("PYTHONPATH", real["PYTHONPATH"])
        for name in os.environ.keys() - real.keys():
            monkeypatch.delenv(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "DEAR_SPMD_SUITE" not in os.environ:
        _restore_environ(item.config.stash[_ENVIRON])
    for name, (holds, reason) in CONDITIONS.items():
        if item.get_closest_marker(name) is not None and not holds():
            pytest.skip(reason)


def _restore_environ(before: dict[str, str]) -> None:
    """Take away what libraries that were imported since have set: jobs of tests would inherit it."""
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _no_session_is_left() -> Iterator[None]:
    """A test in this process that leaves a session open makes others fail that happen to run after it."""
    yield
    session = sys.modules.get("overlap.job.session")
    if session is not None and session.is_initialized() and "DEAR_SPMD_SUITE" not in os.environ:
        session.shutdown()
        pytest.fail("the test left its session open")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first: several processes then end at about the same time.

    ``DEAR_TESTS=fast`` takes the fast tier (`tests.tiers`), ``DEAR_TESTS=rest`` what that leaves out, and
    ``DEAR_TESTS=beside`` a part of it. The jobs of whole suites run in all, and choose among what runs inside them.
    With ``DEAR_SLOW_TESTS=only``, nothing but what is slow: here and, since they inherit the variable, in the suites' jobs.
    """
    items.sort(key=lambda item: item.path.name != "test_spmd.py")
    tier = Tier(os.environ.get("DEAR_TESTS", ""))
    if tier is not Tier.ALL and os.environ.get("DEAR_SPMD_PART", "") == "":
        fast = _in_ranks(items) if "DEAR_SPMD_SUITE" in os.environ else _in_this_process(items)
        both = {item for item in items if item.path.name == "test_spmd.py" and _is_fast(item)}
        out = [item for item in items if item not in both and not tier.takes(item in fast)]
        if tier is Tier.BESIDE and os.environ.get("DEAR_SPMD_SUITE") == "spmd":
            out += [item for item in items if item not in fast and not is_beside(item.nodeid, _job())]
        config.hook.pytest_deselected(items=out)
        left = set(out)
        items[:] = [item for item in items if item not in left]
    if os.environ.get("DEAR_SLOW_TESTS") == "only":
        quick = [i for i in items if i.get_closest_marker("slow") is None and i.path.name != "test_spmd.py"]
        config.hook.pytest_deselected(items=quick)
        items[:] = [item for item in items if item not in quick]


def _is_fast(item: pytest.Item) -> bool:
    return item.get_closest_marker("full") is None


def _in_this_process(items: list[pytest.Item]) -> set[pytest.Item]:
    """All that are not marked `full`; what several launchers may start is started by one of them, in turn."""
    same: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in items:
        if _is_fast(item):
            others = (
                [value for value in _values(item).items() if value[0] != "launcher"]
                if _has_launcher(item)
                else [item.nodeid]
            )
            same.setdefault((item.nodeid.partition("[")[0], *others), []).append(item)
    return {cases[number % len(cases)] for number, cases in enumerate(same.values())}


def _has_launcher(item: pytest.Item) -> bool:
    return "launcher" in getattr(getattr(item, "callspec", None), "params", ())


def _job() -> str:
    from tests.spmd_plugin import OVER_MPI, SIZE

    wire = os.environ.get("COMM_CORE_TEST_BACKEND") or ("mpi" if OVER_MPI else "torchrun")
    return f"{wire}-{SIZE}"


def _in_ranks(items: list[pytest.Item]) -> set[pytest.Item]:
    """Those that the fast tier runs in this job, which all of its ranks find alike."""
    job, third = _job(), os.environ.get("DEAR_TEST_DEVICE") != "pretended"
    promises: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if _is_fast(item):
            promise, strategy = _promise(item)
            promises.setdefault(promise, {}).setdefault(strategy, []).append(item)
    found = set()
    for promise, cases in promises.items():
        item = next(iter(cases.values()))[0]
        if job in jobs_of(promise, _spread(item)) or not is_known(job):
            found |= {case for strategy in strategies_of(promise, list(cases), third=third) for case in cases[strategy]}
    return found


def _spread(item: pytest.Item) -> tuple[str, ...]:
    """The jobs of its suite among which promises are spread."""
    suite = os.environ["DEAR_SPMD_SUITE"]
    if suite == "comm_core":
        return OVER_TCP if os.environ.get("COMM_CORE_TEST_BACKEND") in ("tcp", "sockets") else OVER_MPI
    if suite == "backend":
        return OF_THE_BACKEND[_takes_four(item)]
    return FOUR if _takes_four(item) else TWO


def _takes_four(item: pytest.Item) -> bool:
    return item.get_closest_marker("four_ranks") is not None


def _promise(item: pytest.Item) -> tuple[str, str]:
    """A test with all of its values but the strategy, and that; the strategy is empty where the test has none."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    strategy = next((params[name] for name in STRATEGY if isinstance(params.get(name), str)), "")
    return (item.nodeid.replace(strategy, "*", 1), strategy) if strategy else (item.nodeid, "")


def _values(item: pytest.Item) -> dict[str, Hashable]:
    """Of its parameters, as far as they are names or numbers: another object is the case itself."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: value for name, value in params.items() if isinstance(value, (str, int, float, type(None)))}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = sorted(str(value) for value in _told(terminalreporter, "suite"))
    if lines:
        terminalreporter.section("suites that ran inside every rank")
        for line in lines:
            terminalreporter.write_line(line)
    alone = Counter(_reason(report) for report in terminalreporter.getreports("skipped"))
    lines = table(alone, dict(_told(terminalreporter, "skipped")))
    if lines and "DEAR_SPMD_SUITE" not in os.environ:
        terminalreporter.section("tests that did not run, by reason")
        for line in lines:
            terminalreporter.write_line(line)


def _told(terminalreporter: Any, what: str) -> list[Any]:
    """What tests that passed have recorded under this name."""
    reports = terminalreporter.getreports("passed")
    return [value for report in reports for name, value in report.user_properties if name == what]


def _reason(report: pytest.TestReport) -> str:
    place = report.longrepr
    return str(place[2] if isinstance(place, (tuple, list)) else place).removeprefix("Skipped: ")
