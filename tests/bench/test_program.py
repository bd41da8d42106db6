"""A benchmark that is told to end does so in order."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness import ROOT

SCRIPT = """
import os, signal
from bench.program import end_in_order
signal.signal(signal.SIGHUP, signal.SIG_IGN if {ignored} else signal.SIG_DFL)  # nohup may have started the tests
end_in_order()
try:
    os.kill(os.getpid(), signal.{number})
    print("goes on")
finally:
    print("hosts are removed")
"""


@pytest.mark.parametrize(
    ("number", "ignored", "code", "said"),
    [
        ("SIGTERM", False, 143, "hosts are removed"),
        ("SIGHUP", False, 129, "hosts are removed"),
        ("SIGHUP", True, 0, "goes on\nhosts are removed"),
    ],
)
def test_who_is_told_to_end_leaves_in_order(number: str, ignored: bool, code: int, said: str) -> None:
    script = SCRIPT.format(number=number, ignored=ignored)
    job = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (job.returncode, job.stdout.strip()) == (code, said)
