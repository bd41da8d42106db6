"""A link between hosts that is down for ever: what is sent over it is dropped, and no connection is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.emulation.cluster import Cluster
from tests.dearrun.processes import runs, wait_for
from tests.harness import ROOT

# With less patience for an mpirun that does not end.
_DEARRUN = "from dearrun import cli, supervision; supervision._AFTER_FAILURE_SECONDS = 3.0; cli.main()"
_WORKER = """
import os, sys
from pathlib import Path
import torch
import dear
dear.init()
model = torch.nn.Linear(4, 2)
optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
step = 0
while True:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    step += 1
    if step == 5:
        folder = Path(sys.argv[1])
        (folder / "new").with_suffix(f".{dear.rank()}").write_text(str(os.getpid()))
        (folder / "new").with_suffix(f".{dear.rank()}").rename(folder / f"rank-{dear.rank()}")
"""


@pytest.mark.needs_root
@pytest.mark.real_start
@pytest.mark.parametrize("silent", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_job_whose_hosts_lose_their_link_one_way_ends(silent: int, tmp_path: Path) -> None:
    """Ranks abort by their limit; mpirun waits for the far host for ever, and so dearrun ends without it."""
    (tmp_path / "train.py").write_text(_WORKER)
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    with Cluster(2) as cluster:
        agents = dict.fromkeys(("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"), cluster.agent)
        limits = {"DEAR_STALL_WARN_SECONDS": "0", "DEAR_STALL_ABORT_SECONDS": "10", "OMP_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))}
        hosts = ",".join(f"{cluster.address(host)}:1" for host in range(2))
        script = [sys.executable, str(tmp_path / "train.py"), str(tmp_path)]
        job = cluster.enter(0, [sys.executable, "-c", _DEARRUN, "-np", "2", "-H", hosts, *script])
        environ = kept | agents | limits | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(job, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                wait_for(lambda: all(file.exists() for file in files))
                other = f"{cluster.address(1 - silent)}/32"
                subprocess.run(cluster.enter(silent, ["ip", "route", "add", "blackhole", other]), check=True)
                said, _ = process.communicate(timeout=100)
            finally:
                process.kill()
        assert process.returncode not in (0, -9), said
        told = "lost its connection to rank|will not come; aborting the job"  # whichever notices the silence first
        assert re.search(told, said), said
        wait_for(lambda: not any(runs(int(file.read_text())) for file in files))
