"""The check of one rank over NCCL, over a double of it: it passes where all is well, and says what is not."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import comm_core
from bench.gpu import one_rank
from tests.gpu_double import Double, eventually
from tests.nccl.conftest import double, gpu

__all__ = ["double", "gpu"]  # fixtures


class DoubleCard:
    """`bench.gpu.one_rank.Card` on the double, whose memory is the host's."""

    device = 0
    place = torch.device("cpu")

    def __init__(self, double: Double) -> None:
        self.stream, self.nap = double.stream, double.nap
        self._double = double

    def run(self, stream: int, compute: Callable[[], object]) -> None:
        def kernel() -> None:
            compute()

        self._double.call(stream, kernel)

    def settle(self) -> None:
        eventually(lambda: not self._double.run())


@pytest.fixture
def card(gpu: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[DoubleCard]:
    monkeypatch.setenv("COMM_CORE_NCCL", str(gpu.path))
    monkeypatch.setenv("COMM_CORE_CUDA", str(gpu.path))
    monkeypatch.setattr("comm_core.nccl_connect.watch_exit", lambda size: None)
    monkeypatch.setattr(one_rank, "_COUNT", 1003)
    monkeypatch.setattr(one_rank, "_NAP", 0.3)
    gpu._library.double_colors((ctypes.c_int * 1)(0), 1)
    with gpu.working():
        yield DoubleCard(gpu)


def _said(card: one_rank.Card) -> tuple[int, list[str]]:
    lines: list[str] = []
    failed = one_rank.examine(card, lines.append)
    print(*lines, sep="\n")
    return failed, [" ".join(line.replace(":", "").split()[:2]) for line in lines]


def test_all_is_well_over_the_double(card: DoubleCard) -> None:
    failed, said = _said(card)
    assert said == [
        "NCCL 2.29.7",
        *(f"ok {part}" for part in ("init", "results", "streams", "memory", "split", "abandon", "close")),
    ]
    assert failed == 0


def test_a_host_that_comes_late_tries_again(card: DoubleCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have the core while a nap lasts; that is no fault of the memory's."""
    late = iter([True])

    def collect() -> None:
        if next(late, False):
            time.sleep(one_rank._NAP * 2)

    monkeypatch.setattr(one_rank.gc, "collect", collect)
    assert _said(card)[0] == 0
    monkeypatch.setattr(one_rank.gc, "collect", lambda: time.sleep(one_rank._NAP))
    failed, said = _said(card)
    assert failed == 1
    assert "FAIL memory" in said


def test_a_group_that_cannot_be_made_is_told(card: DoubleCard, gpu: Double) -> None:
    gpu.fail("ncclCommInitRank", 3)
    assert _said(card) == (1, ["NCCL 2.29.7", "FAIL init"])


def test_an_operation_that_does_not_follow_its_stream_is_found(
    card: DoubleCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = one_rank._buffer
    monkeypatch.setattr(one_rank, "_buffer", lambda card, tensor, stream, owner=None: right(card, tensor, 0, owner))
    failed, said = _said(card)
    assert "FAIL streams" in said
    assert "ok results" in said, "a part that fails ends no other"
    assert "ok close" in said
    assert failed >= 1


def test_memory_that_is_let_go_too_early_is_found(card: DoubleCard, monkeypatch: pytest.MonkeyPatch) -> None:
    right = one_rank._buffer
    kept: list[object] = []  # not through the operation

    def forgets(card: one_rank.Card, tensor: torch.Tensor, stream: int, owner: object = None) -> comm_core.Buffer:
        kept.append(tensor)
        return right(card, tensor, stream, tensor)

    monkeypatch.setattr(one_rank, "_buffer", forgets)
    failed, said = _said(card)
    assert "FAIL memory" in said
    assert failed >= 1


def test_wrong_bits_are_found(card: DoubleCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero that has lost its sign is enough."""
    zeros = one_rank._values(card)[::5]
    assert bool(torch.signbit(zeros).all())
    assert one_rank._same(zeros, zeros.clone())
    assert not one_rank._same(zeros, zeros + 0)
    monkeypatch.setattr(one_rank, "_same", lambda one, other: False)
    failed, said = _said(card)
    assert failed == len(one_rank._PARTS)
    assert "ok close" in said


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert one_rank.main() == 2
    assert "no GPU" in capsys.readouterr().err
