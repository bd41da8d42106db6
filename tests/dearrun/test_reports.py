"""What is read of workers' ends in mpirun's stderr, and what is left of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess

import pytest

from dearrun.command import Job
from dearrun.mpirun import Flavor
from dearrun.reports import Place, Reports, obstacle, reporting


@pytest.mark.parametrize(
    ("tagged", "stream", "shown"),
    [
        (False, "a\n\x1eT 0 0\nb\n\x1eT 1 0\n", "a\nb\n"),
        (False, "50%\r60%\x1eT 0 0\n\x1eT 1 0\nrest", "50%\r60%rest"),
        (True, "[1,0]<stderr>: a\n[1,0]<stderr>: \x1eT 0 0\n[1,1]<stderr>: \x1eT 1 0\n", "[1,0]<stderr>: a\n"),
        (True, "[0] a\n[0] \x1eT 0 0\n[1] \x1eT 1 0\n", "[0] a\n"),  # MPICH's
        (True, "[1,0]<stderr>: a\x1eT 0 0\n[1,1]<stderr>: \x1eT 1 0\n", "[1,0]<stderr>: a\n"),
        (False, "\x1eT 0 a:7:1\n\x1eT 1 b.c:8:2\nhere\n\x1eT 0 0\n\x1eT 1 0\n", "here\n"),
        (
            True,
            "[1,0]<stderr>: \x1eT 0 a-b:7:1\n[1,0]<stderr>: x\n[0] \x1eT 0 0\n[1] \x1eT 1 0\n",
            "[1,0]<stderr>: x\n",
        ),
        (False, "\x1e\x1eT 0 0\n\x1eT 0 0\n\x1eT 1 0\n\x1e", "\x1e\x1e"),
        (False, "\x1eT 0 0\n\x1eT 1 0\n\x1e" + 200 * "-", "\x1e" + 200 * "-"),
    ],
)
def test_reports_are_taken_out_wherever_the_stream_is_cut(tagged: bool, stream: str, shown: str) -> None:
    cuts = random.Random(0)
    for trial in range(50):
        reports = Reports("T", 2, tagged=tagged)
        sizes = [len(stream)] if trial == 0 else [cuts.randrange(1, 9) for _ in stream]
        left, found = stream.encode(), b""
        for size in sizes:
            found += reports.without(left[:size])
            left = left[size:]
        assert (found + reports.rest()).decode() == shown
        assert reports.verdict() == (0, "")


def test_what_cannot_become_a_report_is_shown_at_once() -> None:
    reports = Reports("T", 1, tagged=False)
    assert reports.without(b"50%\r") == b"50%\r"
    assert reports.without(b"go on? [y/n] ") == b"go on? [y/n] "
    assert reports.without(b"a\n60%\x1eT 0") == b"a\n"
    assert reports.rest() == b"60%\x1eT 0"


def test_the_verdict_names_who_is_missing() -> None:
    reports = Reports("T", 40, tagged=False)
    for rank in range(20):
        reports.without(f"\x1eT {rank} 0\n\x1eother {rank + 20} 0\n".encode())
    status, said = reports.verdict()
    assert status == 1
    assert "20 of 40 workers was not reported (ranks 20, 21, 22" in said
    assert "35, ...): the connection" in said


def test_it_is_known_whether_nobody_called_init() -> None:
    for second, said in ((" alone", True), ("", False)):
        reports = Reports("T", 2, tagged=False)
        assert reports.without(f"a\n\x1eT 0 0 alone\n\x1eT 1 0{second}\n".encode()) == b"a\n"
        assert reports.verdict() == (0, "")
        assert ("2 processes ran, and none of them called" in reports.strangers()) is said


def test_who_has_begun_and_not_ended_is_known_with_its_place() -> None:
    reports = Reports("T", 3, tagged=False)
    assert reports.without(b"\x1eT 1 b.org:8:20\n\x1eT 0 a:7:10\n\x1eT 2 c:9:30\n") == b""
    assert not reports.failed
    reports.without(b"\x1eT 0 0\n")
    assert reports.left() == {1: Place("b.org", 8, 20), 2: Place("c", 9, 30)}
    assert not reports.failed
    reports.without(b"\x1eT 2 3\n")
    assert (set(reports.left()), reports.failed) == ({1}, True)


@pytest.mark.parametrize(
    ("does", "ends"), [("exit 3", 3), ("kill -TERM $$", -signal.SIGTERM), ("kill -KILL $$", -signal.SIGKILL)]
)
def test_a_worker_ends_as_if_it_had_no_shell_beside_it(does: str, ends: int) -> None:
    """mpirun tells what has failed from what a signal has ended."""
    command = reporting(["sh", "-c", does], "T", watched=False)
    told = {"PATH": os.environ["PATH"], "PMI_RANK": "1"}
    said = subprocess.run(command, capture_output=True, text=True, env=told, timeout=60, check=False)
    assert said.returncode == ends
    assert said.stderr == 2 * f"\x1eT 1 {ends if ends > 0 else 128 - ends}\n"


@pytest.mark.parametrize(
    ("flavor", "command", "options", "said"),
    [
        (Flavor.OPEN_MPI_4, "a", "", ""),
        (Flavor.MPICH, "a", "-bind-to none", ""),
        (Flavor.OPEN_MPI_5, "a", "--output dir=x", "with --output of --mpi-args their stderr may go elsewhere"),
        (Flavor.OPEN_MPI_5, "a", "--output=dir=x", "with --output of"),
        (Flavor.OPEN_MPI_5, "a", "-x A --merge-stderr-to-stdout", "with --merge-stderr-to-stdout of"),
        (Flavor.OPEN_MPI_4, "a", "--mca orte_output_filename x", "with orte_output_filename of"),
        (Flavor.MPICH, "a", "-outfile-pattern x", "with -outfile-pattern of"),
        (Flavor.OPEN_MPI_5, "a", "--wdir /data/output", ""),
        (Flavor.OPEN_MPI_5, "a", "--wdir=/data/output -x XML=--merge -x stderr", ""),
        (Flavor.OPEN_MPI_5, "a", "--prtemca plm_ssh_args -output --mca btl self", ""),
        (Flavor.OPEN_MPI_4, "a", "--mca", ""),
        (Flavor.OPEN_MPI_5, "a : -np 1 b", "", "the command starts several programs"),
        (Flavor.OTHER, "a", "", "this mpirun is neither Open MPI nor MPICH"),
    ],
)
def test_where_reports_come_through(flavor: Flavor, command: str, options: str, said: str) -> None:
    """Of mpirun's options their names count, and not what they are given."""
    found = obstacle(flavor, Job(workers=2, command=tuple(command.split()), mpi_arguments=tuple(options.split())))
    assert found.startswith(said)
    assert bool(found) is bool(said)
