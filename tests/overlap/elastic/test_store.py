"""Commits on disk, and the order of samples at any world size."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from overlap.elastic import lock
from overlap.elastic import store as module
from overlap.elastic.sampler import order_of, part_of
from overlap.elastic.store import CommitError, CommitStore, default_directory, store_at


def _commits(folder: Path) -> list[str]:
    """What lies there beside the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    store = CommitStore(tmp_path / "a" / "b")
    assert store.newest() is None
    for step in range(4):
        assert store.write({"step": step, "tensor": torch.full((3,), float(step))}) == step + 1
    assert _commits(store.directory) == ["commit-00000003.pt", "commit-00000004.pt"]
    found = CommitStore(tmp_path / "a" / "b").newest()
    assert found is not None
    assert (found[0], found[1]["step"], found[1]["tensor"].tolist()) == (4, 3, [3.0] * 3)


def test_a_damaged_commit_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CommitStore(tmp_path)
    store.write("first")
    store.write("second")
    newest = tmp_path / "commit-00000002.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    (tmp_path / "commit-00000003.partial").write_bytes(b"killed while writing")
    assert store.newest() == (1, "first")
    assert "commit 2" in caplog.text
    (tmp_path / "commit-00000001.pt").write_bytes(b"")
    with pytest.raises(CommitError, match=r"none of the commits in .* can be read"):
        store.newest()
    assert store.write("third") == 3
    assert store.newest() == (3, "third")


def test_a_damaged_commit_is_not_kept_in_place_of_a_good_one(tmp_path: Path) -> None:
    store = CommitStore(tmp_path)
    store.write("first")
    store.write("second")
    (tmp_path / "commit-00000002.pt").write_bytes(b"half")
    for again in CommitStore(tmp_path), store:  # as a job that is launched again finds it, and as one that goes back
        assert again.newest() == (1, "first")
    store.write("third")
    assert _commits(tmp_path) == ["commit-00000001.pt", "commit-00000003.pt"]
    (tmp_path / "commit-00000003.pt").write_bytes(b"half")
    assert store.newest() == (1, "first")


def test_a_commit_with_one_bit_changed_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever the bit is; torch.load() notices few of them."""
    store = CommitStore(tmp_path)
    store.write("first")
    store.write({"weights": torch.ones(100)})
    newest = tmp_path / "commit-00000002.pt"
    good = newest.read_bytes()
    places = random.Random(0)
    for place in (*(places.randrange(len(good)) for _ in range(100)), *range(len(good) - 20, len(good))):
        changed = bytearray(good)
        changed[place] ^= 1 << places.randrange(8)
        newest.write_bytes(changed)
        caplog.clear()
        assert store.newest() == (1, "first")
        assert f"commit 2 in {tmp_path} cannot be read: it" in caplog.text
    newest.write_bytes(good)
    assert store.newest() is not None
    assert torch.load(newest)["weights"].tolist() == [1.0] * 100  # by torch alone as well


def test_a_file_of_torchs_that_is_no_commit_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CommitStore(tmp_path)
    store.write("first")
    torch.save({"model": 1}, tmp_path / "commit-00000002.pt")
    assert store.newest() == (1, "first")
    assert "commit 2" in caplog.text
    assert "it is no commit: it does not end with a commit's checksum" in caplog.text


def _in_a_child(action: Callable[[], str]) -> str:
    """What `action` returns in a forked process, which then is killed."""
    incoming, outgoing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(outgoing, action().encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    said = os.read(incoming, 10000).decode()
    os.close(incoming)
    os.close(outgoing)
    return said


def _claimed(folder: Path) -> str:
    try:
        CommitStore(folder).claim()
    except CommitError as error:
        return str(error)
    return "claimed"


def test_a_commit_that_can_be_read_again_is_kept(tmp_path: Path) -> None:
    """As on a file system that fails for a moment."""
    store = CommitStore(tmp_path)
    store.write("first")
    store.write("second")
    newest = tmp_path / "commit-00000002.pt"
    good = newest.read_bytes()
    newest.write_bytes(b"half")
    assert store.newest() == (1, "first")
    newest.write_bytes(good)
    assert store.newest() == (2, "second")
    store.write("third")
    assert _commits(tmp_path) == ["commit-00000002.pt", "commit-00000003.pt"]


def test_two_jobs_do_not_commit_into_one_directory(tmp_path: Path) -> None:
    store = CommitStore(tmp_path)
    store.write("first")
    said = _in_a_child(lambda: _claimed(tmp_path))
    assert f"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}" in said
    assert "give this one a directory of its own (DEAR_ELASTIC_DIR)" in said
    assert store.write("second") == 2  # also after the other was here
    assert "is in use by" in _in_a_child(lambda: _claimed(tmp_path))
    CommitStore(tmp_path).claim()  # two stores of one process are one job
    store.clear()
    assert _in_a_child(lambda: _claimed(tmp_path)) == "claimed"


def test_a_directory_of_two_names_is_locked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a name that means another directory now is another one's."""
    folder, elsewhere, link = tmp_path / "commits", tmp_path / "elsewhere", tmp_path / "link"
    elsewhere.mkdir()
    held = len(lock._held)
    lock.take(folder)
    link.symlink_to(folder)
    lock.take(link)
    assert len(lock._held) == held + 1
    lock.release(link)
    assert not (folder / "lock").exists()
    assert _in_a_child(lambda: _claimed(folder)) == "claimed"

    monkeypatch.chdir(tmp_path)
    lock.take(Path("commits"))
    monkeypatch.chdir(elsewhere)
    lock.take(Path("commits"))
    for taken in (folder, elsewhere / "commits"):
        assert "is in use by" in _in_a_child(lambda taken=taken: _claimed(taken))
        lock.release(taken)
        assert _in_a_child(lambda taken=taken: _claimed(taken)) == "claimed"


def test_a_job_that_was_killed_keeps_no_directory(tmp_path: Path) -> None:
    """Also while processes live on that it forked, as loaders of data do."""

    def claim() -> str:
        said = _claimed(tmp_path)
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        return f"{said} {child}"

    said, child = _in_a_child(claim).split()
    try:
        assert said == "claimed"
        assert (tmp_path / "lock").exists()
        os.kill(int(child), 0)
        assert CommitStore(tmp_path).write("first") == 1
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_directory_that_is_removed_meanwhile_is_made_and_locked_again(tmp_path: Path) -> None:
    store = CommitStore(tmp_path / "commits")
    store.write("first")
    shutil.rmtree(store.directory)
    assert store.write("second") == 1
    assert "is in use by" in _in_a_child(lambda: _claimed(store.directory))


def test_the_lock_of_another_job_is_left_where_it_is(tmp_path: Path) -> None:
    """It has removed this job's directory, and made it again."""
    lock.take(tmp_path)
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").write_text("process 7 on another.example")
    lock.release(tmp_path)
    assert (tmp_path / "lock").exists()


def test_where_there_are_no_locks_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", unsupported)
    assert CommitStore(tmp_path).write("first") == 1
    assert f"{tmp_path} cannot be locked" in caplog.text


def test_what_cannot_be_written_leaves_the_last_commit(tmp_path: Path) -> None:
    store = CommitStore(tmp_path)
    store.write("first")
    with pytest.raises(CommitError, match="commit 2 could not be written"):
        store.write(lambda: None)
    assert _commits(tmp_path) == ["commit-00000001.pt"]
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CommitError, match=str(file)):
        CommitStore(file).write("nowhere")


def test_a_disk_that_fills_up_is_what_a_failed_commit_reports(tmp_path: Path) -> None:
    """Not what torch says when it fails to close the file after that. A limit on files' sizes stands for the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CommitError, match=r"commit 1 could not be written to .*\[Errno \d+\] File too large"):
            CommitStore(tmp_path).write(torch.zeros(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert _commits(tmp_path) == []


def test_a_finished_job_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    store = CommitStore(tmp_path / "commits")
    store.write("first")
    (store.directory / "commit-00000002.partial").touch()  # of a job that was killed
    store.clear()
    store.clear()
    assert list(tmp_path.iterdir()) == []
    store.write("first")
    (store.directory / "notes.txt").touch()
    store.clear()
    assert [path.name for path in store.directory.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("chosen", [None, "commits"])
def test_a_store_stays_where_it_was_when_the_script_goes_elsewhere(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEAR_ELASTIC_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    store = store_at(chosen)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir("below")
    store.write("first")
    assert list(Path().iterdir()) == []
    monkeypatch.chdir(tmp_path)
    _launched_again(monkeypatch)
    assert store_at(chosen).newest() == (1, "first")


def _launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process: no state was made."""
    monkeypatch.setattr(module, "_made", Counter())


@pytest.mark.parametrize("kept", [True, False])
def test_states_of_one_script_are_found_again_by_their_order(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the script keeps them or drops each before the next, and where one never commits."""
    monkeypatch.setenv("DEAR_ELASTIC_DIR", str(tmp_path))
    alive: list[CommitStore] = []
    for run in ("made", "found"):
        _launched_again(monkeypatch)
        for name in ("one", None, "three"):
            store = store_at(None)
            if run == "made" and name is not None:
                store.write(name)
            assert store.newest() == (None if name is None else (1, name))
            if kept:
                alive.append(store)
            del store
            assert store_at(tmp_path / "own").newest() is None  # one with a directory of its own does not count
    assert _commits(tmp_path) == ["3", "commit-00000001.pt"]
    monkeypatch.setenv("DEAR_ELASTIC_DIR", str(tmp_path / "3"))
    assert store_at(None).newest() == (1, "three")  # each directory has a count of its own


def test_default_directory() -> None:
    assert default_directory({"DEAR_ELASTIC_DIR": "/data/x"}, ["train.py"]) == Path("/data/x")
    plain, other = (default_directory({}, ["scripts/train.py", "--lr", lr]) for lr in ("1", "2"))
    assert plain.parent == Path(".dear-elastic")
    assert plain.name.startswith("train-")
    assert plain != other
    assert plain == default_directory({}, ["scripts/train.py", "--lr", "1"])


@pytest.mark.parametrize("length", [0, 1, 7, 12])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_are_even_and_hold_everything(length: int, size: int) -> None:
    order = order_of(length, shuffle=True, seed=3, epoch=1)
    parts = [part_of(order, rank, size) for rank in range(size)]
    assert {len(part) for part in parts} == {-(-length // size)}
    assert {index for part in parts for index in part} == set(range(length))


def test_batches_of_all_ranks_are_the_same_at_any_world_size() -> None:
    order = order_of(24, shuffle=True, seed=0, epoch=2)
    for size in (1, 2, 3, 6):
        per_rank = 6 // size
        parts = [part_of(order, rank, size) for rank in range(size)]
        for batch in range(4):
            taken = {index for part in parts for index in part[batch * per_rank : (batch + 1) * per_rank]}
            assert taken == set(order[batch * 6 : (batch + 1) * 6])
    assert order != order_of(24, shuffle=True, seed=0, epoch=3)
    assert order_of(4, shuffle=False, seed=0, epoch=3) == [0, 1, 2, 3]
