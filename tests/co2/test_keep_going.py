"""A rank is killed in the middle of a round: the others go on, and it comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from co2.equations import nesterov
from tests.harness import run_script

FREQUENCY, KILLED_AT, MORE = 4, 21, 9
ROUNDS = KILLED_AT // FREQUENCY  # that are complete by then
SHARD = 64  # elements of each of three ranks
SCRIPT = """
import json, os, signal, time
from pathlib import Path
import torch
import co2
from tests.co2.test_keep_going import FREQUENCY, KILLED_AT, MORE, SHARD

me = f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
while me == "0.1" and not Path("alone").exists():
    time.sleep(0.05)
co2.init()
model = torch.nn.Linear(3 * SHARD, 1, bias=False, dtype=torch.float64)
torch.nn.init.zeros_(model.weight)
state = co2.elastic.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), step=0, end=None)

def note(**what):
    with open(f"calls-{me}", "a") as file:
        file.write(json.dumps({"rank": co2.rank(), "size": co2.size(), "weight": model.weight.tolist()[0], **what}) + "\\n")

@co2.keep_going
def train(state):
    optimizer = co2.DistributedOptimizer(state.optimizer, state.model, outer="diloco", outer_frequency=FREQUENCY)
    outer = optimizer.outer_state_dict()["parameters"]
    note(step=state.step, momentum=outer[0]["momentum"].tolist()[0] if outer else None)
    if co2.size() == 2:
        Path("alone").touch()
    if co2.size() == 3 and state.step > 0:
        state.end = state.step + MORE
    while state.step != state.end:
        if me == "0.0" and state.step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (-(co2.rank() + 1) * state.model.weight.sum()).backward()
        optimizer.step()
        state.step += 1
        co2.allreduce(torch.tensor(float(state.step)), name="seen")  # who is killed never asks for it
        time.sleep(0.02)
    optimizer.average_parameters()

train(state)
note(step=state.step, momentum=None)
"""


def _calls(folder: Path, who: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"calls-{who}").read_text().splitlines()]


def _before_it_was_killed() -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters and the outer momentum after all rounds of three ranks, in one process."""
    weight, momentum = torch.zeros(3 * SHARD, dtype=torch.float64), torch.zeros(3 * SHARD, dtype=torch.float64)
    for _ in range(ROUNDS):
        ends = [weight + FREQUENCY * (rank + 1) for rank in range(3)]
        weight, momentum = nesterov(weight, weight - torch.stack(ends).mean(0), momentum, 0.7, 0.9)
    return weight, momentum


def test_a_killed_rank_costs_at_most_a_round_and_comes_back(tmp_path: Path) -> None:
    output = run_script(tmp_path, SCRIPT, 3, "restarts", DEAR_ELASTIC_DIR=str(tmp_path / "commits")).check().output
    first, second, back = (_calls(tmp_path, who) for who in ("1.0", "2.0", "0.1"))
    assert [call["size"] for call in first] == [call["size"] for call in second] == [3, 2, 3, 3]
    assert [call["rank"] for call in first] == [1, 0, 0, 0]
    assert [(call["rank"], call["size"]) for call in back] == [(2, 3), (2, 3)]

    # Where two go on: at the mean of what they had learned since the last round, without the momentum of the lost shard.
    weight, momentum = _before_it_was_killed()
    alone = first[1]
    assert alone["step"] == KILLED_AT + 1
    learned = torch.tensor(alone["weight"], dtype=torch.float64) - weight
    torch.testing.assert_close(learned, torch.full_like(learned, (KILLED_AT + 1 - ROUNDS * FREQUENCY) * (2 + 3) / 2))
    momentum[:SHARD] = 0
    torch.testing.assert_close(torch.tensor(alone["momentum"], dtype=torch.float64), momentum)

    # Where it is back: it has what the others have, of all shards.
    returned = [first[2], second[2], back[0]]
    for name in ("step", "weight", "momentum"):
        assert returned[0][name] == returned[1][name] == returned[2][name]
    assert all(value < -1 for value in returned[0]["momentum"])
    assert first[3]["weight"] == second[3]["weight"] == back[1]["weight"]
    assert first[3]["step"] == back[1]["step"] == returned[0]["step"] + MORE
    assert "rank(s) [0] of 3 are lost" in output
    assert "a rank has come, and waits for the others" in output


PLAIN = """
import torch, co2
co2.init()
state = co2.elastic.TorchState(model=torch.nn.Linear(2, 1))

@co2.keep_going
def train(state):
    return co2.size()

print(f"trained on {train(state)}")
"""


def test_other_launches_train_as_ever_and_say_that_a_lost_rank_ends_them(tmp_path: Path) -> None:
    output = run_script(tmp_path, PLAIN, DEAR_ELASTIC_DIR=str(tmp_path / "commits")).check().output
    assert output.count("trained on 2") == 2
    assert output.count("a rank that is lost ends this job: keep_going needs 'dearrun --restarts N'") == 1


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_a_wrong_launch_is_refused_in_one_line(launcher: str, tmp_path: Path) -> None:
    result = run_script(tmp_path, PLAIN, 2, launcher, DEAR_KEEP_GOING="1")
    assert result.returncode != 0
    assert result.output.count("DEAR_KEEP_GOING=1 needs an agent of torchrun's for each worker") == 1
    assert "Traceback" not in result.output.partition("DEAR_KEEP_GOING=1 needs")[0]


LOOP = """
import os, time
import torch
import co2

me = f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
co2.init()
model = torch.nn.Linear(2, 1)
state = co2.elastic.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), step=0)

def endless():
    while True:
        sum(range(1000))

@co2.keep_going
def train(state):
    optimizer = co2.DistributedOptimizer(state.optimizer, state.model, outer="diloco", outer_frequency=2)
    last = state.step + 4 if co2.size() == 2 and state.step else 1000000
    while state.step < last:
        if me == "1.0" and state.step == 5:
            endless()
        optimizer.zero_grad()
        state.model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        time.sleep(0.02)
    optimizer.average_parameters()

train(state)
print(f"{me} has come to the end", flush=True)
"""


@pytest.mark.full
def test_a_rank_in_an_endless_loop_is_given_up_and_comes_back(tmp_path: Path) -> None:
    env = {
        "DEAR_STALL_WARN_SECONDS": "0",
        "DEAR_STALL_ABORT_SECONDS": "8",
        "DEAR_ELASTIC_DIR": str(tmp_path / "commits"),
    }
    output = run_script(tmp_path, LOOP, 2, "restarts", **env).check().output
    assert "rank(s) [1] on" in output
    assert "are given up" in output
    assert "the others have given this process up, and it ends here:" in output
    assert "in endless" in output
    assert "0.0 has come to the end" in output
    assert "1.1 has come to the end" in output
