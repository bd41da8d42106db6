"""Collectives by name when a rank does not take part: it is named, and nobody waits for what will not come."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import run_script

SCRIPT = """
import logging, time
import torch
import dear as hvd
logging.basicConfig(level=logging.INFO)
hvd.init()
mine = [hvd.allreduce_async(torch.ones(3), name=f"only rank {hvd.rank()} has this {n}") for n in range(2)]
if hvd.rank() == 1:
    time.sleep(4)
    hvd.shutdown()
    assert not hvd.is_initialized()
else:
    hvd.allreduce_async(torch.ones(3), name="nobody waits for this")
later = lambda _: hvd.allreduce(torch.ones(1), name="later")
for call, handle in ((hvd.synchronize, mine[0]), (hvd.synchronize, mine[1]), (later, None)):
    try:
        call(handle)
    except (hvd.HorovodInternalError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_a_rank_that_never_asks_is_named_and_then_not_waited_for(launcher: str, tmp_path: Path) -> None:
    output = run_script(tmp_path, SCRIPT, 2, launcher, timeout=400, DEAR_STALL_WARN_SECONDS="2").check().output
    # The watchdog, while rank 1 sleeps: which tensor, who asked, who is missing.
    assert "has waited" in output
    assert "allreduce 'only rank 0 has this 0' (asked for by ranks [0], missing: ranks [1])" in output
    # Rank 0, once rank 1 has shut down: what it waits for, and what it asks for later.
    for name in ("only rank 0 has this 0", "only rank 0 has this 1", "later"):
        assert f"HorovodInternalError: allreduce '{name}': rank 1 has shut down and will not take part" in output
    # Rank 1, whose shutdown ends with rank 0's: handles that are left fail, new operations are refused.
    assert "HorovodInternalError: allreduce 'only rank 1 has this 0': rank 0 has shut down" in output
    assert "NotInitialized: call dear.init() first" in output


NO_MEMORY = """
import time
import torch
import dear as hvd
from overlap.horovod.allreduce import Allreduce
hvd.init()
if hvd.rank() == 1:
    start = Allreduce.start
    def no_memory(self, response, group):
        if response.request.name == "large":
            raise MemoryError("no room")
        return start(self, response, group)
    Allreduce.start = no_memory
large = hvd.allreduce_async(torch.ones(3), name="large")
if hvd.rank() == 0:
    alone = hvd.allreduce_async(torch.ones(3), name="asked for by one rank")
calls = [lambda: hvd.synchronize(large), lambda: hvd.allreduce(torch.ones(1), name="later")]
for call in calls if hvd.rank() == 1 else [lambda: hvd.synchronize(alone), *reversed(calls)]:
    try:
        call()
    except (hvd.HorovodInternalError, MemoryError) as error:
        print(f"rank {hvd.rank()}: {type(error).__name__}: {error}", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_a_rank_that_cannot_start_an_operation_takes_part_in_nothing_more(launcher: str, tmp_path: Path) -> None:
    """What it would start next would meet the others' operation before that."""
    result = run_script(tmp_path, NO_MEMORY, 2, launcher)
    output, failed = result.output, "allreduce 'large' could not be started on rank 1: no room"
    assert "rank 1: MemoryError: no room" in output
    assert f"rank 1: HorovodInternalError: allreduce 'later': {failed}" in output
    for name in ("asked for by one rank", "later"):
        assert f"rank 0: HorovodInternalError: allreduce '{name}': rank 1 has failed ({failed})" in output
    # Rank 0 waits in what was started there.
    assert re.search(r"rank\(s\) \[1\] on \S+ will not come; aborting the job", output), output
    assert not result.timed_out
    assert result.returncode


AGAIN = """
import torch
import dear as hvd
hvd.init()
old = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
hvd.barrier()
hvd.shutdown()
hvd.init()
new = hvd.allreduce_async(torch.full((1,), 7.0), op=hvd.Sum)
try:
    hvd.synchronize(old)
except ValueError as error:
    print(error)
assert hvd.synchronize(new).item() == 7.0 * hvd.size()
"""


@pytest.mark.full
def test_a_handle_of_an_earlier_session_is_none(tmp_path: Path) -> None:
    output = run_script(tmp_path, AGAIN, 2, "torchrun", timeout=400).check().output
    assert output.count("was never given out since init()") == 2


LATE = """
import sys, time
import torch
import co2 as hvd
hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)  # whose averages it waits for, too
hvd.barrier()
print("joins now", file=sys.stderr, flush=True)
if hvd.rank() == 1:
    time.sleep(5)
hvd.join()
print("has joined", file=sys.stderr, flush=True)
"""


@pytest.mark.full
def test_who_has_joined_is_not_waiting_too_long(tmp_path: Path) -> None:
    """From the moment at which no rank is behind any more: before, and at the end, one may be waited for."""
    output = run_script(tmp_path, LATE, timeout=400, DEAR_STALL_WARN_SECONDS="1").check().output
    assert output.count("joins now") == output.count("has joined") == 2
    assert "waited" not in output.rpartition("joins now")[2].partition("has joined")[0]
