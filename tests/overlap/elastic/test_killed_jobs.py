"""A job that is killed in the middle, twice, and ends where one that was never killed does."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.harness import run_ranks

SAMPLES, GLOBAL_BATCH, EPOCHS = 48, 12, 2
SCRIPT = """
import logging, os, signal
import torch
import dear as hvd
from tests.overlap.elastic.test_killed_jobs import EPOCHS, GLOBAL_BATCH, data, fresh
logging.basicConfig(level=logging.INFO)

hvd.init()
samples = data()
model, optimizer = fresh()
optimizer = hvd.DistributedOptimizer(optimizer, model)
sampler = hvd.elastic.ElasticSampler(samples, seed=3)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)
state.register_reset_callbacks([lambda: print(f"reset at step {state.step}\\n", end="", flush=True)])
per_rank = GLOBAL_BATCH // hvd.size()
kill_at = [int(step) for step in os.environ["KILL_AT"].split(",") if step]

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, EPOCHS):
        if not sampler.processed_indices:
            sampler.set_epoch(state.epoch)
        loader = torch.utils.data.DataLoader(samples, batch_size=per_rank, sampler=sampler)
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if state.step in kill_at and hvd.rank() == hvd.size() - 1 and not os.path.exists(f"killed-{state.step}"):
                open(f"killed-{state.step}", "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            sampler.record_batch(number, per_rank)
            state.step += 1
            state.commit()
        sampler.set_epoch(state.epoch + 1)

train(state)
if hvd.rank() == 0:
    torch.save([state.step, model.state_dict()], "result.pt")
"""


def data() -> torch.Tensor:
    return torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
    return model, torch.optim.Adam(model.parameters(), 0.01)


def _never_killed() -> dict[str, torch.Tensor]:
    from overlap.elastic.sampler import order_of

    model, optimizer = fresh()
    samples = data()
    for epoch in range(EPOCHS):
        order = order_of(SAMPLES, shuffle=True, seed=3, epoch=epoch)
        for first in range(0, SAMPLES, GLOBAL_BATCH):
            optimizer.zero_grad()
            model(samples[order[first : first + GLOBAL_BATCH]]).square().mean().backward()
            optimizer.step()
    return model.state_dict()


def test_a_killed_job_continues_at_another_size_under_another_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {"DEAR_ELASTIC_DIR": str(tmp_path / "commits")}

    first = run_ranks(2, [str(script)], timeout=400, env={**env, "KILL_AT": "2"}, cwd=tmp_path)
    assert not first.timed_out
    assert first.returncode != 0
    assert "reset" not in first.output
    # torchrun restarts the workers by itself.
    options = ["--max-restarts=1", str(script)]
    second = run_ranks(3, options, "torchrun", timeout=400, env={**env, "KILL_AT": "5"}, cwd=tmp_path).check()
    assert second.output.count("reset at step 2") == 3
    assert "made by 2 rank(s), on 3" in second.output
    assert second.output.count("reset at step 5") == 3
    assert not (tmp_path / "commits").exists()

    steps, result = torch.load(tmp_path / "result.pt")
    assert steps == EPOCHS * SAMPLES // GLOBAL_BATCH
    for name, value in _never_killed().items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=1e-12)
