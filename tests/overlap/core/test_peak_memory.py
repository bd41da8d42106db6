"""What a process needs at most: the first step, and a change of buckets, must not leave freed memory behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_script

SCRIPT = """
import importlib, sys, torch
import dear

def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

def wrapped(layers):
    model = torch.nn.Sequential(*[torch.nn.Linear(500, 500) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    return model, strategy.DistributedOptimizer(optimizer, model, threshold_mb=4.0)

def steps(model, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 500)).sum().backward()
        optimizer.step()

dear.init()
strategy = importlib.import_module(sys.argv[1])
steps(*wrapped(1))  # what Python and torch load for it
model, optimizer = wrapped(60)
model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
before = resident("VmRSS")
steps(model, optimizer)
first = (resident("VmHWM") - before) / model_bytes
optimizer.replan(optimizer.strategy.at({"threshold_mb": 1.0}))
steps(model, optimizer)
after = (resident("VmRSS") - before) / model_bytes
print(f"in the first steps {first:.2f} models, after a change of buckets {after:.2f}")
assert first < 3.0, first
assert after < 2.8, after
"""
# glibc that keeps all it can, as docs/environment.md advises for training on CPUs.
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


@pytest.mark.parametrize(
    ("strategy", "env"),
    [
        pytest.param("dear", KEPT, id="dear-kept", marks=pytest.mark.full),
        pytest.param("oss", {}, id="oss-as-ever"),
        pytest.param("dear", {}, id="dear-as-ever", marks=pytest.mark.full),
        pytest.param("oss", KEPT, id="oss-kept", marks=pytest.mark.full),
    ],
)
def test_freed_gradients_and_parameters_are_given_back(strategy: str, env: dict[str, str], tmp_path: Path) -> None:
    """New are the gradients' buckets and the averaged shard, which on one rank is as large as the model: two models.

    Where freed memory stayed, it took 2.7 to 3.2 in the first steps and 3.1 to 5.9 after the change.
    """
    print(run_script(tmp_path, SCRIPT, 1, "mpi", strategy, **env).check().output)
