"""Whether the torchrun that started a process is there still."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness import ROOT

_WORKER = """
import sys
from overlap.health.launcher import agent_gone, line_to_agent
gone = agent_gone()
print(len(line_to_agent()), line_to_agent()[-1:], gone(), flush=True)
sys.stdin.readline()
print(gone(), flush=True)
"""
# It starts the worker below a script, and is killed.
_AGENT = f"""
import os, subprocess, sys
environ = {{**os.environ, "TORCHELASTIC_RUN_ID": "1"}}
subprocess.Popen(["sh", "-c", '"$0" -c "$1"; true', sys.executable, {_WORKER!r}], env=environ)
import signal; signal.pause()
"""


@pytest.mark.real_start
def test_an_agent_that_is_killed_is_missed_also_where_a_script_stands_between() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    with subprocess.Popen(
        [sys.executable, "-c", _AGENT],
        env={**environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdin is not None
        assert agent.stdout.readline().startswith(f"2 [({agent.pid}, ")
        agent.kill()
        agent.wait()
        agent.stdin.write("\n")
        agent.stdin.flush()
        said = agent.stdout.readline()
    assert said == (
        f"torchrun (process {agent.pid}), which has started it, is gone, and nobody would end it with the others\n"
    )


@pytest.mark.real_start
def test_a_process_that_no_torchrun_has_started_misses_nobody() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    text = "from overlap.health.launcher import agent_gone, line_to_agent\nprint(line_to_agent(), [agent_gone()()])"
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[] ['']\n"
