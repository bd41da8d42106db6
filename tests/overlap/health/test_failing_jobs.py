"""Nothing hangs in silence: what a job of several ranks does when one of them goes wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from overlap.health import failures
from overlap.job.settings import SettingError
from tests.harness import Result, run_script
from tests.overlap.health.training_job import IMPORTS, LAUNCHERS, TRAINING


def _run(folder: Path, text: str, launcher: str, *, real_start: bool = False, **env: str) -> Result:
    return run_script(folder, IMPORTS + TRAINING + text, 2, launcher, real_start=real_start, **env)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(launcher: str, tmp_path: Path) -> None:
    result = _run(tmp_path, "if dear.rank() == 1:\n    raise ValueError('the one cause')\ntrain(1000)\n", launcher)
    assert not result.timed_out
    assert result.returncode != 0
    assert "rank 1 of 2 failed" in result.output
    assert result.output.count("ValueError: the one cause") == 1


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "how", [pytest.param("os._exit(3)", marks=pytest.mark.full), "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_a_rank_that_dies_ends_the_job(launcher: str, how: str, tmp_path: Path) -> None:
    result = _run(tmp_path, f"if dear.rank() == 1:\n    {how}\ntrain(100000)\n", launcher)
    assert not result.timed_out
    assert result.returncode != 0
    said = {
        "mpi": r"process rank 1\b[^-]*signal 9|Process name: \[.*,1\]\s+Exit code: +3",
        "torchrun": r"rank +: 1 .*\s+exitcode +: (-9|3) ",
    }
    assert re.search(said[launcher], result.output), f"who died, and of what, is not said:\n{result.output}"
    noticed = result.output.count("rank 0 of 2 failed")  # unless the launcher ends it before
    lost = re.findall(
        r"rank 0 of 2 lost its connection to rank 1 on \S+(?: during [^\n]*)?: that rank was killed or", result.output
    )
    assert len(lost) == noticed


@pytest.mark.full
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_is_killed_in_a_collective_by_name_ends_the_job(launcher: str, tmp_path: Path) -> None:
    text = """
def metrics():
    for number in range(100000):
        dear.allreduce(torch.ones(3), name=f"loss {number % 7}")
        if dear.rank() == 1 and number == 50:
            os.kill(os.getpid(), signal.SIGKILL)
metrics()
"""
    result = _run(tmp_path, text, launcher)
    assert not result.timed_out
    assert result.returncode != 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_left_is_named_and_the_job_ended(launcher: str, tmp_path: Path) -> None:
    """Within seconds: it comes to nothing any more, so nobody has to wait for DEAR_STALL_ABORT_SECONDS."""
    result = _run(tmp_path, "train(2)\nif dear.rank() == 1:\n    sys.exit(0)\ntrain(100000)\n", launcher)
    assert not result.timed_out
    assert result.returncode != 0
    waited = re.search(r"rank 0 has waited (\d+) s for ", result.output)
    assert waited
    assert int(waited[1]) < 60
    assert "has left" in result.output
    assert (
        "rank(s) [1] have not come to what rank 0 waits in: fewer steps there (join() is for uneven data)"
        in result.output
    )
    assert re.search(r"rank\(s\) \[1\] on \S+ will not come; aborting the job", result.output), result.output


@pytest.mark.full
def test_who_computes_is_not_ended_for_what_a_rank_that_left_never_issued(tmp_path: Path) -> None:
    text = """
import wfbp
model = torch.nn.Linear(4, 8)
optimizer = wfbp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
train(2)
if dear.rank() == 0:
    model(torch.ones(3, 4)).sum().backward()
    time.sleep(8)
dear.shutdown()
print("the end", flush=True)
"""
    assert _run(tmp_path, text, "mpi").check().output.count("the end") == 2


@pytest.mark.full
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_slow_rank_is_reported_and_waited_for(launcher: str, tmp_path: Path) -> None:
    text = "if dear.rank() == 1:\n    time.sleep(4)\ntrain(2)\nprint(f'done {dear.rank()}')\n"
    settings = {"DEAR_STALL_WARN_SECONDS": "1", "DEAR_STALL_ABORT_SECONDS": "2"}
    result = _run(tmp_path, text, launcher, **settings).check()
    assert "has waited" in result.output
    assert "done 0" in result.output


@pytest.mark.parametrize("launcher", ["mpi", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_ranks_that_wait_for_each_other_end_the_job_once_none_of_them_goes_on(launcher: str, tmp_path: Path) -> None:
    """By an exception where all wait by name; where one is in a step, which nothing can interrupt, at once."""
    text = """
from overlap.job.session import current
current().watchdog._abort_after = 2.0  # not in init(), to which a busy machine brings ranks at different times
mine = dear.allreduce_async(torch.ones(1), name=f"of {dear.rank()}")
if dear.rank() == 0:
    dear.synchronize(mine)
time.sleep(3 * dear.rank())
dear.allreduce(torch.ones(1), name=f"of {1 - dear.rank()}")
print("waited for who computes", dear.rank(), flush=True)
try:
    dear.barrier() if dear.rank() else dear.allreduce(torch.ones(1), name="a")
except dear.HorovodInternalError as error:
    print(f"rank {dear.rank()} was told: {error}", flush=True)
train(1)
train(1) if dear.rank() else dear.allreduce(torch.ones(1), name="last")
"""
    settings = {"DEAR_STALL_WARN_SECONDS": "0", "DEAR_STALL_ABORT_SECONDS": "60"}
    result = _run(tmp_path, text, launcher, **settings)
    assert not result.timed_out
    assert result.returncode != 0
    assert result.output.count("waited for who computes") == 2
    assert result.output.count("every rank has waited for 2 s") == 3, result.output  # each rank once, and who aborts
    for rank in range(2):
        told = result.output.split(f"rank {rank} was told: ")[1]
        assert re.search(r"rank 0: .* training; waiting in allreduce 'a' \(asked for by ranks \[0\], missing", told)
        assert re.search(r"rank 1: .* training; waiting in barrier 'noname.1'", told)
    last = result.output.split("every rank has waited for 2 s")[-1]
    assert re.search(r"rank 0: .* training; waiting in allreduce 'last'", last)
    assert re.search(r"rank 1: .* training; waiting in reduce_scatter 'b0' .*\[b0: \S*(weight|bias).*, step \d\]", last)
    assert "aborting the job" in last


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_may_leave_at_different_times(launcher: str, tmp_path: Path) -> None:
    text = (
        "train(2)\nif dear.rank() == 0:\n    time.sleep(2)\n    print('saved', len(optimizer.state_dict()['state']))\n"
    )
    result = _run(tmp_path, text, launcher).check()
    assert "saved 0" in result.output  # plain SGD has no state; the other rank, in shutdown already, answered


@pytest.mark.full
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_backward_pass_that_only_one_rank_ran_is_given_up_at_the_end(launcher: str, tmp_path: Path) -> None:
    text = """
import bytescheduler_adapter, oss, wfbp
from bytescheduler_adapter.dispatcher import Dispatcher
at_once = Dispatcher._issue
def late(self, part):  # as on a busy machine, where shutdown() begins before its thread comes to anything
    time.sleep(0.5)
    return at_once(self, part)
wraps = [
    dear.DistributedOptimizer,
    lambda inner, model: dear.DistributedOptimizer(inner, model, threshold_mb=0.2, eager=True),
    wfbp.DistributedOptimizer,
    oss.DistributedOptimizer,
    bytescheduler_adapter.DistributedOptimizer,
]
for wrap in wraps:
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)])
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.001), model)
    for step in range(4 if dear.rank() else 5):
        if step == 4:
            Dispatcher._issue = late
        model(torch.ones(3, 300)).sum().backward()
        if step < 4:
            optimizer.step()
            optimizer.zero_grad()
dear.shutdown()
print(f"the end {bool(torch.isfinite(model[0].weight).all())}\\n", end="", flush=True)
"""
    result = _run(tmp_path, text, launcher).check()
    assert result.output.count("the end True") == 2
    assert result.output.count("operation(s) are given up that other ranks never issued: ") == 1
    assert "rank 0: at shutdown" in result.output


_LATE_LETTERS = """
import gc
import bytescheduler_adapter
from bytescheduler_adapter import dispatcher
rank = dear.rank()
torch.manual_seed(0)
def late(letter, decode=dispatcher.decode):  # as on a slow network, where shutdown() begins before its letters are read
    time.sleep(0.1 * rank)
    return decode(letter)
model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)])
def train(last):
    inner = torch.optim.SGD(model.parameters(), 0.01)
    optimizer = bytescheduler_adapter.DistributedOptimizer(inner, model, partition_mb=0.1, credit_mb=0.2)
    for step in range(3):
        loss = model(torch.full((3, 300), 1.0 + rank)).square().mean()
        if step == 2:
            dispatcher.decode = late
        last(loss, optimizer) if step == 2 else step_by(loss, optimizer)
def step_by(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_END = """
gc.collect()
dear.shutdown()
print(f"the end {float(sum(p.detach().double().abs().sum() for p in model.parameters())):.9f}\\n", end="", flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_partitions_of_an_optimizer_that_is_gone_are_sent_before_the_end(launcher: str, tmp_path: Path) -> None:
    """As in main(), whose optimizer is garbage when the process ends: every rank ends, with the last step made."""
    result = _run(tmp_path, f"{_LATE_LETTERS}\ntrain(step_by)\n{_END}", launcher).check()
    kept = _run(tmp_path, f"{_LATE_LETTERS}\ntrain(step_by)\nmodel(torch.ones(3, 300))\n{_END}", launcher).check()
    ends = [line for run in (result, kept) for line in re.findall(r"the end (\S+)", run.output)]
    assert len(ends) == 4
    assert len(set(ends)) == 1


@pytest.mark.full
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_backward_pass_of_other_layers_on_each_rank_is_given_up_at_the_end(launcher: str, tmp_path: Path) -> None:
    """Ranks have submitted as much as one another, and not the same."""
    text = """
def other_layers(loss, optimizer):
    model[1 + 2 * rank](torch.ones(3, 300)).sum().backward()
train(other_layers)
"""
    result = _run(tmp_path, _LATE_LETTERS + text + _END, launcher).check()
    assert result.output.count("the end") == 2
    assert "operation(s) are given up that other ranks never issued: " in result.output


@pytest.mark.parametrize(
    ("launcher", "whose"),
    [pytest.param("mpi", "optimizer", marks=pytest.mark.full), ("mpi", "model"), ("torchrun", "model")],
)
def test_a_step_that_only_one_rank_skipped_ends_the_job(tmp_path: Path, launcher: str, whose: str) -> None:
    """From then on parameters differ, and what is gathered for one step meets what is gathered for another.

    Whether the model's zero_grad() was called, a rank sees in its next backward.
    """
    text = f"""
for step in range(1000):
    model(torch.ones(3, 4)).sum().backward()
    if step == 5 and dear.rank() == 1:
        {whose}.zero_grad()
        continue
    optimizer.step()
    optimizer.zero_grad()
"""
    result = _run(tmp_path, text, launcher)
    assert not result.timed_out
    assert result.returncode != 0
    # Raised, or where rank 0 waits inside an operation already, reported as the job is ended.
    assert re.search(
        r"(RuntimeError: |ERROR:dear:)rank 1 has dropped the gradients of step \d \(zero_grad", result.output
    )


def test_a_launcher_of_another_mpi_is_noticed(tmp_path: Path) -> None:
    promised = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}
    result = run_script(tmp_path, "import dear\ndear.init()\n", 1, "single", **promised)
    assert result.returncode != 0
    assert "promises 3 rank(s)" in result.output


@pytest.mark.parametrize(
    ("launcher", "name", "said"),
    [
        *((launcher, "DEAR_POISON", "DEAR_POISON should hold 0 or 1 and holds 'maybe': ") for launcher in LAUNCHERS),
        pytest.param(
            *("mpi", "COMM_CORE_WINDOW", "COMM_CORE_WINDOW=maybe: expected an integer from 1 to 1024; "),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_wrong_variable_is_said_once_without_a_traceback(launcher: str, name: str, said: str, tmp_path: Path) -> None:
    """By rank 0, also where another rank is there first: what that one says goes elsewhere."""
    text = """
import os, time
if "0" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("RANK")):
    while not os.path.exists("rank 1"):
        time.sleep(0.1)
    time.sleep(1)
else:
    os.dup2(os.open("rank 1", os.O_WRONLY | os.O_CREAT), 2)
import dear
dear.init()
"""
    result = run_script(tmp_path, text, 2, launcher, **{name: "maybe"})
    assert result.returncode != 0
    assert result.output.count(f"environment variable {said}correct or unset it") == 1
    assert str(tmp_path) not in result.output.split(said)[0]  # no traceback of ours; torchrun has one of its own
    assert "overlap" not in result.output
    assert said not in (tmp_path / "rank 1").read_text()


def test_a_wrong_variable_can_be_caught(tmp_path: Path) -> None:
    text = "import dear\ntry:\n    dear.init()\nexcept ValueError as error:\n    print('caught', error)\n"
    result = run_script(tmp_path, text + "raise RuntimeError('another')\n", 1, "single", DEAR_LOG_LEVEL="loud")
    assert result.returncode == 1
    assert result.output.count("DEAR_LOG_LEVEL should hold") == 1
    assert re.search("Traceback.*RuntimeError: another", result.output, re.DOTALL)


def test_a_rank_whose_variable_alone_is_wrong_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failures, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    error = SettingError("what is wrong")
    failures.say_in_one_line(error, rank=1)
    sys.excepthook(SettingError, error, None)
    assert capsys.readouterr().err == "what is wrong\n"


def test_a_forked_child_ends_by_itself(tmp_path: Path) -> None:
    """Over MPI. Under torchrun torch's own destructors wait, or crash, in a child that ends without os._exit()."""
    text = """
import os, sys
child = os.fork()
if child == 0:
    sys.exit(dear.rank())
_, status = os.waitpid(child, 0)
print("the child of", dear.rank(), "ended with", os.waitstatus_to_exitcode(status), flush=True)
train(2)
"""
    output = _run(tmp_path, text, "mpi", real_start=True).check().output
    assert "the child of 0 ended with 0" in output
    assert "the child of 1 ended with 1" in output
    assert "Traceback" not in output
