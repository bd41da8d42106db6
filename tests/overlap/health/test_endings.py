"""Whatever state a job is in, it ends within its limit where a rank, a launcher or a store answers no more."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.dearrun.processes import runs, wait_for
from tests.harness import ROOT, Result, run_script
from tests.overlap.health.relay import Network, Relay
from tests.overlap.health.training_job import IMPORTS, LAUNCHERS, TRAINING

LIMITS = {"DEAR_STALL_WARN_SECONDS": "0", "DEAR_STALL_ABORT_SECONDS": "6"}  # a start on a busy machine stays below


def _run(folder: Path, text: str, launcher: str, **env: str) -> Result:
    return run_script(folder, IMPORTS + text, 2, launcher, timeout=400, **{**LIMITS, **env})


@pytest.mark.parametrize(
    ("launcher", "where", "said"),
    [
        ("mpi", "find_uneven", r"rank\(s\) \[1\] on \S+ will not come; aborting the job"),
        ("torchrun", "find_uneven", r"rank\(s\) \[1\] on \S+ will not come; aborting the job"),
        ("mpi", "close_all", r"rank 0 of 2 \(.*\) closes its connections, as all ranks do, and waits for one that"),
    ],
)
def test_a_rank_that_stands_still_in_shutdown_ends_the_job(
    launcher: str, where: str, said: str, tmp_path: Path
) -> None:
    """Before all have come there, and after, where nobody answers any more and MPI waits for all."""
    text = f"""
from overlap.job import session
if dear.rank() == 1:
    session.{where} = lambda *arguments: stand_still()
dear.shutdown()
"""
    result = _run(tmp_path, TRAINING + text, launcher)
    assert not result.timed_out
    assert result.returncode != 0
    assert re.search(said, result.output), result.output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_leaves_waits_for_one_that_answers(launcher: str, tmp_path: Path) -> None:
    """For much longer than the limit: it trains."""
    text = "if dear.rank() == 1:\n    time.sleep(9)\ndear.shutdown()\nprint('the end', flush=True)\n"
    result = _run(tmp_path, TRAINING + text, launcher, DEAR_STALL_ABORT_SECONDS="4").check()
    assert result.output.count("the end") == 2


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_never_comes_to_init_is_named(launcher: str, tmp_path: Path) -> None:
    text = "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('RANK')) == '1':\n    stand_still()\n"
    result = _run(tmp_path, text + TRAINING, launcher)
    assert not result.timed_out
    assert result.returncode != 0
    assert re.search(
        r"rank 0 of 2 \(\S+\) waits in init\(\) for the others: rank\(s\) \[1\] (of this host )?have not come to it, "
        r"for 6 s \(DEAR_STALL_ABORT_SECONDS\); this process ends",
        result.output,
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_of_a_rank_in_an_endless_loop_the_others_show_where_it_is(launcher: str, tmp_path: Path) -> None:
    text = """
import logging
class Seen(logging.Handler):
    def emit(self, record):
        if "in endless" in record.getMessage():
            Path("seen").touch()
logging.getLogger("dear").addHandler(Seen())
def endless():
    while not os.path.exists("seen"):
        sum(range(1000))
if dear.rank() == 1:
    endless()
train(2)
print("goes on", flush=True)
"""
    result = _run(
        tmp_path, TRAINING + text, launcher, DEAR_STALL_WARN_SECONDS="1", DEAR_STALL_ABORT_SECONDS="60"
    ).check()
    assert result.output.count("goes on") == 2


# - Where torchrun itself is what has gone, or the way to it

HERE = 'Path(f"rank-{dear.rank()}").write_text(str(os.getpid()))\n'
TRAINS = f"""{HERE}
if dear.rank() == 1:
    while not os.path.exists("stop"):
        train(1)
    Path("stopped").touch()
    stand_still()
train(1000000)
"""
WAITS = "while not os.path.exists('stop'):\n    time.sleep(0.02)\n"
CONNECTS = f"""{HERE}{WAITS}
dear.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), 0.1), model[0])
dear.shutdown()
print("the end", flush=True)
"""
LEAVES = f"""
if dear.rank() == 0:
    optimizer.state_dict()
{HERE}{WAITS}
if dear.rank() == 1:
    optimizer.state_dict()
dear.shutdown()
print("the end", flush=True)
"""
BY_RELAY = """
Path("store-" + os.environ["RANK"]).write_text(f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}")
os.replace("store-" + os.environ["RANK"], "store")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["RELAY"])
"""


@contextmanager
def _started(
    folder: Path, text: str = TRAINING + TRAINS, **env: str
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A job of two ranks under torchrun, and their processes. In the end nobody of it is left."""
    (folder / "script.py").write_text(IMPORTS + text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **LIMITS, **env}
    files = [folder / f"rank-{rank}" for rank in range(2)]
    ranks: list[int] = []
    with (folder / "output").open("wb") as output:
        agent = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output)
        try:
            wait_for(lambda: all(file.exists() and file.read_text() for file in files))
            ranks += [int(file.read_text()) for file in files]
            yield agent, ranks
        finally:
            for process in (*ranks, agent.pid):
                if runs(process):
                    os.kill(process, signal.SIGKILL)
            agent.wait()


@pytest.mark.real_start
def test_ranks_end_when_their_torchrun_has_been_killed(tmp_path: Path) -> None:
    with _started(tmp_path) as (agent, ranks):
        agent.kill()
        agent.wait()
        wait_for(lambda: not any(map(runs, ranks)))
    said = (tmp_path / "output").read_text()
    assert re.search(rf"torchrun \(process {agent.pid}\), which has started it, is gone", said), said


@pytest.mark.real_start
def test_a_rank_ends_in_time_where_the_store_answers_no_more(tmp_path: Path) -> None:
    """A question to another rank would wait for torchrun's store for half an hour."""
    with _started(tmp_path) as (agent, ranks):
        agent.send_signal(signal.SIGSTOP)
        (tmp_path / "stop").touch()
        wait_for((tmp_path / "stopped").exists)
        wait_for(lambda: not runs(ranks[0]))
    said = (tmp_path / "output").read_text()
    assert re.search(r"rank\(s\) \[1\] on \S+ will not come; aborting the job", said), said


def _without_store(folder: Path, text: str, network: Network) -> str:
    """What a job says whose `network` to the store, which is whole in the beginning, becomes another one."""

    def store() -> tuple[str, int]:
        address, port = (folder / "store").read_text().split()
        return address, int(port)

    with Relay(store) as relay, _started(folder, BY_RELAY + TRAINING + text, RELAY=str(relay.port)) as (_, ranks):
        relay.network = network
        (folder / "stop").touch()
        wait_for(lambda: not any(map(runs, ranks)))
    return (folder / "output").read_text()


@pytest.mark.real_start
@pytest.mark.parametrize(
    ("network", "text"),
    [
        pytest.param(Network.DROPS, CONNECTS, id="drops-connecting"),
        pytest.param(Network.RESETS, CONNECTS, id="resets-connecting", marks=pytest.mark.full),
        pytest.param(Network.RESETS, LEAVES, id="resets-leaving"),
        pytest.param(Network.DROPS, LEAVES, id="drops-leaving", marks=pytest.mark.full),
    ],
)
def test_a_job_goes_on_where_the_store_is_out_of_reach(network: Network, text: str, tmp_path: Path) -> None:
    """It has brought the ranks together, and nothing more is asked of it."""
    said = _without_store(tmp_path, text, network)
    assert said.count("the end") == 2, said
    assert "rror" not in said, said
