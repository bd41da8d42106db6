"""Who reaches the port of torchrun's store cannot run code in a rank. See docs/security.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, run_script

ATTACKER = """
import os, pickle, sys
from torch.distributed import TCPStore

class Command:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[1]}",)

letters = [pickle.dumps(Command()), pickle.dumps(("ask", 0, "watchdog")) + pickle.dumps(Command()), b"", b"{}"]
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
boxes = [key.removesuffix("/count/0") for key in store.list_keys() if key.endswith("/count/0")]
for box in boxes:
    for letter in letters:
        number = store.add(f"{box}/count/0", 1)
        store.set(f"{box}/0/{number}/0", letter)
        store.set(f"{box}/0/{number}", "1 1")
print("attacked", len(boxes), flush=True)
"""

JOB = """
import subprocess, sys, time
import torch
import dear
from overlap.job.session import current

dear.init()
dear.allreduce(torch.ones(1), name="first")  # rank 0 has letters about names, and from its peer_queries
if dear.rank() == 1:
    current().peer_queries.tell(0, "nothing")
dear.barrier()
if dear.rank() == 0:
    subprocess.run([sys.executable, *sys.argv[1:]], check=True)
    time.sleep(0.5)
model = torch.nn.Linear(4, 4)
optimizer = dear.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
total = dear.allreduce(torch.ones(1), op=dear.Sum, name="last")
if dear.rank() == 0:
    print("saved", len(optimizer.state_dict()["state"]), "total", total.item(), flush=True)
"""


def test_letters_of_a_third_process_run_nothing_and_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "attacker.py").write_text(ATTACKER)
    ran = tmp_path / "ran"
    # Its letters go through the store.
    job = run_script(tmp_path, JOB, 2, "torchrun", "attacker.py", str(ran), timeout=400, DEAR_TRANSPORT="gloo")
    result = job.check()
    assert "attacked 2" in result.output
    assert not ran.exists(), "a letter was executed"
    assert "saved 2 total 2.0" in result.output


LISTENING = """
import os, sys
import dear

dear.init(torch_distributed=sys.argv[1] == "torch")
dear.barrier()
mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}").readlines()[1:]]
ports = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
print(f"listens on {len(ports)} ports at {sorted({port.split(':')[0] for port in ports})}", flush=True)
dear.barrier()
"""


@pytest.mark.parametrize(("group", "expected"), [("none", "0 ports at []"), ("torch", " ports at ['0100007F']")])
def test_workers_of_one_host_listen_on_the_loopback_interface_at_most(
    group: str, expected: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LISTENING)
    command = [sys.executable, "-m", "dearrun", "-np", "2", sys.executable, str(script), group]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.stdout.count(expected) == 2, result.stdout + result.stderr
