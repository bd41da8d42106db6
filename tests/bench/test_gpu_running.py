"""Limits of the checks on a GPU, and the archive that comes back."""

from __future__ import annotations

import json
import os
import signal
import tarfile
import time
from pathlib import Path

import pytest

from bench.gpu import running
from bench.gpu.archive import clipped, pack, with_room
from bench.gpu.running import Ended, run
from tests.gpu_double import eventually

# Shells, which start at once. The worker has a session of its own, as those of torchrun have.
STARTS = "trap '' INT; setsid sleep 600 & echo $!"
HEEDS = "trap 'echo what there is: row 1; exit 1' INT; echo row 1; sleep 600 & wait"


def _run(script: str, folder: Path, seconds: float, grace: float = 5.0) -> tuple[Ended, str]:
    log = folder / "check.log"
    ended = run(("sh", "-c", script), log, os.environ, folder, seconds, grace)
    return ended, log.read_text()


def _is_gone(pid: int) -> bool:
    """No such process, or one that nobody has asked about since it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_how_a_command_ended(tmp_path: Path) -> None:
    assert _run("echo all good", tmp_path, 60) == (Ended("passed"), "all good\n")
    ended, said = _run("echo row; echo the reason >&2; exit 3", tmp_path, 60)
    assert ended == Ended("failed", "exit status 3; its last line: the reason")
    assert said == "all good\nrow\nthe reason\n", "what was there stays"
    missing = run((str(tmp_path / "no-such-program"),), tmp_path / "log", os.environ, tmp_path, 60)
    assert missing.outcome == "failed"
    assert "no-such-program" in missing.reason


def test_who_is_over_the_limit_may_say_what_there_is(tmp_path: Path) -> None:
    ended, said = _run(HEEDS, tmp_path, 1.5)
    assert ended == Ended("stopped", "over its limit of 1.5 s; its last line: what there is: row 1")
    assert said == "row 1\nwhat there is: row 1\n"


def test_who_does_not_heed_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    began = time.monotonic()
    ended, said = _run(STARTS + "; sleep 600", tmp_path, 1.5, 0.5)
    assert time.monotonic() - began >= 2
    assert ended.outcome == "stopped"
    assert said, "it was stopped before it had started its worker"
    eventually(lambda: _is_gone(int(said)))


def test_nothing_that_a_command_has_started_outlives_it(tmp_path: Path) -> None:
    ended, said = _run(STARTS, tmp_path, 60)
    assert ended.outcome == "passed"
    eventually(lambda: _is_gone(int(said)))


def test_who_cannot_be_killed_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill = os.kill
    monkeypatch.setattr(running, "_PATIENCE", 0.2)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    ended, said = _run("trap '' INT; echo $$; exec sleep 600", tmp_path, 1.5, 0.2)
    assert ended.outcome == "stopped"
    assert not _is_gone(int(said))
    kill(int(said), signal.SIGKILL)


def test_small_files_come_first_where_room_is_short() -> None:
    assert with_room({"trace": 900, "log": 10, "rows": 80}, 100) == ["log", "rows"]
    assert with_room({"trace": 900, "log": 10, "rows": 80}, 990) == ["log", "rows", "trace"]
    assert clipped(b"abcdefgh", 8) == b"abcdefgh"
    assert clipped(b"abcdefgh", 4) == "a\n… 4 bytes are left out …\nfgh".encode()


def _members(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]


def test_results_are_the_first_of_the_archive(tmp_path: Path) -> None:
    folder, target = tmp_path / "work", tmp_path / "out.tar.gz"
    (folder / "more").mkdir(parents=True)
    (folder / "a.log").write_text("said")
    (folder / "more" / "rows.json").write_text("[]")
    (folder / "trace").write_bytes(os.urandom(5000))
    assert pack({"checks": {}}, folder, target, most=1000) == ["trace"]
    members = _members(target)
    assert list(members) == ["results.json", "a.log", "more/rows.json"]
    assert json.loads(members["results.json"]) == {"checks": {}, "left_out": ["trace"]}
    assert pack({}, folder, target) == []
    assert set(_members(target)) == {"results.json", "a.log", "more/rows.json", "trace"}
    assert {path.name for path in tmp_path.iterdir()} == {"work", "out.tar.gz"}, "nothing unfinished is left"


def test_an_archive_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = tmp_path / "work", tmp_path / "out.tar.gz"
    folder.mkdir()
    pack({"checks": 1}, folder, target)
    monkeypatch.setattr("bench.gpu.archive._add", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        pack({"checks": 2}, folder, target)
    assert json.loads(_members(target)["results.json"])["checks"] == 1
