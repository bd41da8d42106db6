"""Collectives by name when a rank does not take part: it is named, and nobody waits for what will not come."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import ROOT, run_ranks

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
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {"PYTHONPATH": str(ROOT), "DEAR_STALL_WARN_SECONDS": "2"}
    output = run_ranks(2, [str(script)], launcher, timeout=60, env=env).check().output
    # The watchdog, while rank 1 sleeps: which tensor, who asked, who is missing.
    assert "has waited" in output
    assert "allreduce 'only rank 0 has this 0' (asked for by ranks [0], missing: ranks [1])" in output
    # Rank 0, once rank 1 has shut down: what it waits for, and what it asks for later.
    for name in ("only rank 0 has this 0", "only rank 0 has this 1", "later"):
        assert f"HorovodInternalError: allreduce '{name}': rank 1 has shut down and will not take part" in output
    # Rank 1, whose shutdown ends with rank 0's: handles that are left fail, new operations are refused.
    assert "HorovodInternalError: allreduce 'only rank 1 has this 0': rank 0 has shut down" in output
    assert "NotInitialized: call dear.init() first" in output
