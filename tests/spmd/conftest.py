"""Where the tensors of these suites lie: see tests/spmd/device.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spmd.device import DEVICE, host_only, pretend, use_cuda

if DEVICE == "cuda":
    use_cuda()  # before tests are collected, which make tensors for their tables


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    if not DEVICE:
        yield
        return
    reason = host_only(request.node.nodeid)
    if reason is not None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "pretended":
            pretend(patch)
        yield
