"""Every test of these suites has a session, and tensors where tests/spmd/device.py says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dear
from overlap.horovod.controller.enqueue import runtime
from tests.spmd.device import DEVICE, host_only, pretend, use_device

if DEVICE:
    use_device()  # before tests are collected, which make tensors for their tables
if DEVICE != "cuda":
    # Torch's own notes a traceback for every kind of accelerator that this process has not used: a second in each rank.
    torch.manual_seed = torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def session() -> None:
    dear.init()


@pytest.fixture
def sets_of_a_test() -> Iterator[None]:
    """Process sets are removed before the test and after it: others have such ranks, and a session has each set once."""
    _remove_sets()
    yield
    _remove_sets()


def _remove_sets() -> None:
    for each in list(runtime()._registered.values()):
        dear.remove_process_set(each)


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
