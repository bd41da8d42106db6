"""What one rank says, and does, of an exception that nobody catches. Without any other rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from comm_core import TransportError
from overlap.health import failures

GONE = "receive failed (rank 0 of 2): no bytes from rank 1"
LOST = "all_reduce (3 x float32, rank 0 of 2 on world): unfinished: rank 0 of 2 lost the connection to rank 1: reset"
TOLD = "rank 0 receiving from rank 2, which sends nothing any more: rank 2 of 4 lost the connection to rank 3: reset"


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[type[BaseException]]]:
    """What the hook is told that was there before, as far as it is told anything."""
    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: told.append(kind))
    yield told
    failures.remove()


def _raise(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


@pytest.mark.parametrize(
    ("error", "size", "said"),
    [
        (ValueError(GONE), 2, ""),
        (TransportError(GONE), 2, "rank 0 of 2 lost its connection to rank 1 on b: that rank was killed or failed"),
        (TransportError(LOST), 2, "rank 0 of 2 lost its connection to rank 1 on b: that rank was killed or failed"),
        (TransportError(TOLD), 4, "rank 0 of 4 lost its connection to rank 3 on d: that rank was killed or failed"),
        (TransportError("rank 1 has closed the communicator"), 2, ""),
        (TransportError(GONE), 4, "rank 0 of 4 lost its connection to another rank: that"),  # numbers of a process set
        (
            TransportError(
                "12 bytes expected, 16 received; the ranks disagree about the order or the sizes of operations"
            ),
            2,
            "",
        ),
        (
            TransportError(
                "(rank 0 of 2, 12 bytes): expected barrier, received reduce from rank 1; all ranks of a "
                "communicator have to issue the same operations in the same order"
            ),
            2,
            "",
        ),
        (TransportError("it is closed"), 2, "rank 0 of 2 lost its connection to another rank: that"),
    ],
)
def test_a_rank_that_lost_its_connection_names_the_other_one(error: Exception, size: int, said: str) -> None:
    found = failures.explain(error, 0, size, ["a", "b", "c", "d"][:size])
    assert found.startswith(said)
    assert bool(found) is bool(said)


def test_what_was_under_way_is_told_by_parameters_and_step() -> None:
    error = TransportError("all_gather 'b3' (rank 0 of 2, 8 bytes): receiving 4 bytes from rank 1: gone")
    found = failures.explain(error, 0, 2, ["a", "b"], lambda _, label: f"parameters of {label}, step 7")
    assert "rank 1 on b during all_gather 'b3' (parameters of b3, step 7): that rank" in found
    assert "during" not in failures.explain(error, 0, 2, ["a", "b"], lambda _, label: "")


def test_each_session_ends_the_job_at_an_exception(
    passed_on: list[type[BaseException]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A second one of a process does, too; and once it is over, exceptions are the script's again."""
    statuses: list[int] = []
    for number in (1, 2):
        failures.install(1, 2, statuses.append)
        _raise(ValueError(f"cause {number}"))
        assert capsys.readouterr().err == f"rank 1 of 2 failed:\nValueError: cause {number}\n"
        failures.remove()
        _raise(KeyError())
    assert statuses == [1, 1]
    assert passed_on == [KeyError, KeyError]


def test_a_process_alone_keeps_its_hook(passed_on: list[type[BaseException]]) -> None:
    failures.install(0, 1, sys.exit)
    _raise(ValueError())
    assert passed_on == [ValueError]


@pytest.mark.parametrize(
    ("error", "size", "said"),
    [(ValueError("cause"), 2, True), (ValueError("cause"), 1, False), (SystemExit(0), 2, False), (None, 2, False)],
)
def test_shutdown_inside_an_exception_shows_it(
    error: BaseException | None, size: int, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the end of a script, or Ctrl-C."""
    try:
        if error is not None:
            raise error
        failures.say_what_is_under_way(1, size)
    except BaseException:
        failures.say_what_is_under_way(1, size)
    assert ("rank 1 of 2 calls shutdown() during an exception" in capsys.readouterr().err) is said


@pytest.mark.parametrize(("rank", "waits"), [(0, []), (1, [20.0])])
def test_what_the_user_has_to_correct_is_one_line_first_of_rank_0(
    rank: int,
    waits: list[float],
    passed_on: list[type[BaseException]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("overlap.health.failures.time.sleep", waited.append)
    failures.say_in_one_line(ValueError("wrong"), rank)
    _raise(ValueError("wrong"))
    assert (capsys.readouterr().err, waited) == ("wrong\n", waits)
    _raise(KeyError("another one"))
    assert passed_on == [KeyError]
