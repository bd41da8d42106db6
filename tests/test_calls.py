"""How many calls of ours a training step makes on one rank: literal numbers, which may only become smaller.

Of the thread that computes, which everything waits for. Comprehensions do not count: since Python 3.12 they are no calls.
"""

from __future__ import annotations

import pytest

from tests.harness import run_ranks

#: Sixteen parameters, but for `wfbp` in eight buckets: forward, backward, step(), zero_grad().
#: Nine of step() (three under `wfbp`) are the look whether averages are finite.
CALLS = {
    "dear": (124, 172, 222, 13),
    "oss": (124, 172, 222, 13),
    "wfbp": (84, 185, 185, 9),
    "fsdp": (438, 685, 325, 15),  # at most: for each bucket, backward may give holes of the heap back
}
SCRIPT = """
import sys
import torch
import dear

OURS = {"overlap", "dear", "oss", "wfbp", "fsdp", "comm_core"}
dear.init()
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
strategy = sys.argv[1]
options = {} if strategy == "wfbp" else {"threshold_mb": 0.03}
optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
optimizer = dear.DistributedOptimizer(optimizer, model, strategy=strategy, **options)
x = torch.randn(4, 64)
for _ in range(4):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
optimizer.zero_grad()
assert len(optimizer.buckets) == (16 if strategy == "wfbp" else 8)
calls = 0

def count(frame, event, _argument):
    global calls
    name = frame.f_globals.get("__name__", "").partition(".")[0]
    calls += event == "call" and name in OURS and not frame.f_code.co_name.endswith(("comp>", "expr>"))

def counted(function):
    global calls
    calls = 0
    sys.setprofile(count)
    result = function()
    sys.setprofile(None)
    print(calls)
    return result

loss = counted(lambda: model(x).sum())
counted(loss.backward)
counted(optimizer.step)
counted(optimizer.zero_grad)
dear.shutdown()
"""


@pytest.mark.parametrize("strategy", CALLS)
def test_calls_of_a_step(strategy: str) -> None:
    result = run_ranks(1, ["-c", SCRIPT, strategy], "single").check()
    calls = tuple(map(int, result.output.split()))
    if strategy == "fsdp":
        assert all(found <= most for found, most in zip(calls, CALLS[strategy], strict=True)), calls
    else:
        assert calls == CALLS[strategy]
