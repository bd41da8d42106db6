"""Pages that processes of a host map: only of those that meant them."""

from __future__ import annotations

import os

import torch

from overlap.job.memory.pages import _mapped, in_pages, storage_in


def test_memory_of_another_job_is_not_mapped() -> None:
    """Hosts of one name have processes and files of the same numbers."""
    handle = os.memfd_create("dear-one")
    try:
        os.ftruncate(handle, 4096)
        path = f"/proc/{os.getpid()}/fd/{handle}"
        assert _mapped(path, "dear-other", 4096) == (None, f"{path} is of another job")
        pages, why = _mapped(path, "dear-one", 4096)
        assert pages is not None, why
        os.pwrite(handle, bytes([5]), 64)
        mine = torch.empty(0, dtype=torch.uint8).set_(storage_in(pages, 64, 8))  # type: ignore[call-overload]
        assert mine.tolist() == [5, *[0] * 7]
        assert in_pages(mine)
        assert in_pages(mine[2:])
        assert not in_pages(mine.clone())
        mine.fill_(3)
        assert os.pread(handle, 1, 64) == bytes([5]), "who writes has a copy"
    finally:
        os.close(handle)


def test_what_is_not_there_is_told() -> None:
    pages, why = _mapped(f"/proc/{os.getpid()}/fd/-1", "dear-one", 4096)
    assert pages is None
    assert "No such file" in why
