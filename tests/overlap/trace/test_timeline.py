"""Timelines: the file, what is recorded, also of jobs that end badly, and the picture."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_core
from overlap.trace import picture as timeline_picture
from overlap.trace import timeline
from overlap.trace.file import TraceFile
from overlap.trace.picture import Bar, Row, rows_of
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.native import NativeCommunicator
from overlap.transport.operation import all_reduce, barrier
from tests.harness import run_script


@pytest.fixture
def comm() -> Iterator[Communicator]:
    communicator = NativeCommunicator(comm_core.local())
    yield communicator
    timeline.stop()
    communicator.close()


def _start(path: Path, max_bytes: int = 2**20, **options: Any) -> None:
    timeline.start(str(path), 0, time.time(), max_bytes=max_bytes, **{"mark_cycles": False, **options})


def _spans(path: Path, category: str) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text()) if event.get("cat") == category]


def test_the_file_is_complete_after_every_write_and_never_too_large(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("x" * 5000)
    file = TraceFile(str(path), 3000)
    assert json.loads(path.read_text()) == []
    written = 0
    while file.append([{"number": written}, {"number": written + 1}]):
        written += 2
        assert json.loads(path.read_text()) == [{"number": number} for number in range(written)]
    assert file.append([{"why": "full"}], last_words=True)
    events = json.loads(path.read_text())
    assert events[-1] == {"why": "full"}
    assert [event["number"] for event in events[:-1]] == list(range(len(events) - 1))
    assert 1900 < path.stat().st_size <= 3000
    file.close()


def test_path_for() -> None:
    assert [timeline.path_for("a.json", rank) for rank in (0, 1)] == ["a.json", None]
    assert [timeline.path_for("a-{rank}.json", rank) for rank in (0, 1)] == ["a-0.json", "a-1.json"]


def test_what_is_recorded_of_a_step(tmp_path: Path, comm: Communicator) -> None:
    path = tmp_path / "trace.json"
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Tanh()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _start(path, mark_cycles=True)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    values = torch.ones(6)
    comm.run(all_reduce(values, values, ReduceOp.SUM, label="by name"))
    work = comm.start(barrier())
    assert (work.op, work.label, work.nbytes) == ("barrier", "barrier", 0)
    work.wait()
    timeline.stop()
    assert _spans(path, "phase") == ["forward", "backward", "step"] * 2
    assert _spans(path, "module") == ["0", "1.0", "1"] * 2
    assert (_spans(path, "all_reduce"), _spans(path, "barrier")) == (["all_reduce by name"], ["barrier"])
    events = json.loads(path.read_text())
    assert [event["name"] for event in events if event["ph"] == "i"] == ["CYCLE 1", "CYCLE 2"]
    assert next(event for event in events if event.get("cat") == "all_reduce")["args"]["bytes"] == 24
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and 0 <= event["ts"] < 60e6 for event in spans)


def test_nothing_is_left_behind_when_it_stops(tmp_path: Path, comm: Communicator) -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    threads, before = threading.active_count(), len(hooks)
    _start(tmp_path / "trace.json")
    assert (threading.active_count(), len(hooks)) == (threads + 1, before + 1)
    with pytest.raises(RuntimeError, match=r"trace\.json already: call stop_timeline"):
        _start(tmp_path / "other.json")
    timeline.stop()
    timeline.stop()
    assert (threading.active_count(), len(hooks)) == (threads, before)
    assert Communicator.listener is None
    assert type(comm.start(barrier())).__module__.startswith("comm_core")


def test_a_recording_that_begins_or_ends_within_a_call(tmp_path: Path, comm: Communicator) -> None:
    class Switch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            timeline.stop() if Communicator.listener else _start(tmp_path / "trace.json")
            return x * 2

    x = torch.ones(2, requires_grad=True)
    model = torch.nn.Sequential(Switch(), torch.nn.Tanh())
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="shape"):
        torch.nn.Linear(3, 3)(x)
    model(x).sum().backward()
    timeline.stop()
    # Of the first call only what began after the recording did, then the call that raised; the last one outlived it.
    assert _spans(tmp_path / "trace.json", "phase") == ["forward", "backward", "forward"]


def test_a_full_file_ends_the_recording_with_a_warning(
    tmp_path: Path, comm: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    _start(path, max_bytes=3000)
    for _ in range(100):
        comm.run(barrier())
    timeline.stop()
    events = json.loads(path.read_text())
    assert events[-1]["name"].startswith("timeline ends here: the file has reached its limit")
    assert path.stat().st_size <= 3000
    assert len(caplog.messages) == 1


def test_a_bad_path_raises(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "trace.json"):
        with pytest.raises(OSError, match=str(path)):
            _start(path)
    _start(tmp_path / "trace.json")  # and leaves nothing that would be in the way
    timeline.stop()


def test_the_child_of_a_fork_does_not_write(tmp_path: Path, comm: Communicator) -> None:
    path = tmp_path / "trace.json"
    _start(path)
    child = os.fork()
    if child == 0:
        torch.nn.Tanh()(torch.ones(1))
        timeline.stop()
        os._exit(0)
    os.waitpid(child, 0)
    timeline.stop()
    assert _spans(path, "phase") == []


def _trace(path: Path, rank: int) -> str:
    def span(name: str, category: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        track = {"phase": 0, "wait": 0}.get(category, 1000)
        return {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": track, "ts": ts, "dur": dur, "args": args}

    world = {"bytes": 8, "communicator": "world"}
    events = [
        span("step", "phase", 0, 1000),
        span("forward 3", "phase", 1000, 2000),
        span("wait all_gather b1", "wait", 1500, 500),
        span("all_gather b1", "all_gather", 500, 1500, **world),
        span("all_gather b0", "all_gather", 600, 1900, **world),
        span("step", "phase", 3000, 1000),
        span("step", "phase", 9000, 1000),
    ]
    file = path / f"{rank}.json"
    file.write_text(json.dumps(events))
    return str(file)


def test_a_picture_of_what_was_in_turn(tmp_path: Path) -> None:
    files = [_trace(tmp_path, rank) for rank in (1, 0)]
    by_rank = timeline_picture._ranks(files)
    rows = rows_of(by_rank, steps=1, skip=1)
    gathers = Row(
        "communication (world)", (Bar("AG b1", "all_gather", -0.5, 1.5), Bar("AG b0", "all_gather", 1.0, 0.5))
    )
    phases = Row("rank 0: compute", (Bar("F3", "forward", 0.0, 2.0), Bar("step", "step", 2.0, 1.0)))
    assert rows[:3] == [phases, Row("waits", (Bar("wait AG b1", "wait", 0.5, 0.5),)), gathers]
    assert rows[3].title == "rank 1: compute"
    picture = tmp_path / "picture.png"
    timeline_picture.main([str(picture), *files])
    assert picture.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match=r"rank 0 holds 3 step\(s\), and 3 of them"):
        rows_of(by_rank, steps=1, skip=3)


ENDLESS = """
import os, signal
from pathlib import Path
import torch
import dear
dear.init()
model = torch.nn.Linear(4, 8)
optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
while True:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    if dear.rank() == dear.size() - 1:
        written = [Path(f"{rank}.json").read_text() for rank in range(dear.size())]
        if all('"name":"step"' in events for events in written):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_job_leaves_complete_timelines(tmp_path: Path) -> None:
    result = run_script(tmp_path, ENDLESS, timeout=400, HOROVOD_TIMELINE=f"{tmp_path}/{{rank}}.json")
    assert not result.timed_out
    assert result.returncode != 0
    for rank in (0, 1):
        events = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {"forward", "backward", "step"} <= {event["name"] for event in events}
