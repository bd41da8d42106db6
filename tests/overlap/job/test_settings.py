"""What environments mean: defaults, aliases of Horovod's variables, precedence, and errors."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from overlap.job import logs
from overlap.job.settings import SettingError, Settings, read


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"DEAR_POISON": "1"}, {"poison": True}),
        ({"DEAR_CUDA_TRANSPORT": "Staged"}, {"cuda_transport": "staged"}),
        ({"DEAR_STALL_WARN_SECONDS": ""}, {}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}, {"stall_warn_seconds": 5.0}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, {"stall_abort_seconds": 0.0}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "DEAR_STALL_WARN_SECONDS": "7"}, {"stall_warn_seconds": 7.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, {"stall_warn_seconds": 0.0, "stall_abort_seconds": 0.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, {}),
        (
            {"HOROVOD_STALL_CHECK_DISABLE": "1", "DEAR_STALL_ABORT_SECONDS": "9"},
            {"stall_warn_seconds": 0.0, "stall_abort_seconds": 9.0},
        ),
        ({"HOROVOD_FUSION_THRESHOLD": "3145728"}, {"threshold_mb": 3.0}),
        (
            {"BYTESCHEDULER_PARTITION": "1048576", "BYTESCHEDULER_CREDIT": "2e6", "BYTESCHEDULER_CREDIT_TUNING": "1"},
            {"partition_mb": 4.0, "credit_mb": 8e6 / 2**20, "tune_credit": True},
        ),
        ({"BYTESCHEDULER_TIMELINE": "x"}, {"ignored": ("BYTESCHEDULER_TIMELINE",)}),
        ({"DEAR_THRESHOLD_MB": "auto"}, {"threshold_mb": "auto"}),
        ({"HOROVOD_FUSION_THRESHOLD": "3145728", "DEAR_THRESHOLD_MB": "0"}, {"threshold_mb": 0.0}),
        ({"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}, {"timeline_mark_cycles": True}),
        (
            {"HOROVOD_TIMELINE": "a.json", "DEAR_TIMELINE": "b.json", "DEAR_TIMELINE_MAX_MB": "2"},
            {"timeline": "b.json", "timeline_max_mb": 2.0},
        ),
        ({"HOROVOD_LOG_LEVEL": "WARNING"}, {"log_level": logging.WARNING}),
        (
            {"HOROVOD_NUM_NCCL_STREAMS": "2", "HOROVOD_CYCLE_TIME": "1", "HOROVOD_AUTOTUNE": "", "PATH": "/bin"},
            {"ignored": ("HOROVOD_CYCLE_TIME", "HOROVOD_NUM_NCCL_STREAMS")},
        ),
        (
            {"DEAR_TRESHOLD": "3", "HOROVOD_FUSION_TRESHOLD": "3", "DEAR_BENCH_STORE": "x", "DEAR_BACKEND": "mpi"},
            {
                "misspelt": (
                    ("DEAR_TRESHOLD", "DEAR_THRESHOLD_MB"),
                    ("HOROVOD_FUSION_TRESHOLD", "HOROVOD_FUSION_THRESHOLD"),
                )
            },
        ),
    ],
)
def test_read(environ: dict[str, str], expected: dict[str, Any]) -> None:
    assert read(environ) == Settings(**expected)


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("DEAR_POISON", "maybe", "0 or 1"),
        ("DEAR_STALL_WARN_SECONDS", "soon", "a number of at least 0"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "-1", "a number of at least 0"),
        ("DEAR_STALL_ABORT_SECONDS", "nan", "a number of at least 0"),
        ("BYTESCHEDULER_CREDIT", "0", "a number of elements above 0"),
        ("DEAR_CUDA_TRANSPORT", "gloo", "one of auto, nccl, staged"),
        ("DEAR_BACKEND", "gloo", "one of mpi, torch, single"),
        ("DEAR_LOG_LEVEL", "loud", "one of trace, debug, info, warning, error, fatal"),
    ],
)
def test_nonsense_is_named(name: str, text: str, accepted: str) -> None:
    with pytest.raises(SettingError, match=f"{name} should hold {accepted} and holds '{text}': correct or unset it"):
        read({name: text})


def test_a_level_makes_the_log_visible(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quiet_logger = logging.getLogger("dear")  # as in a script that does not configure logging
    for name, value in {"handlers": [], "level": logging.NOTSET, "propagate": False}.items():
        monkeypatch.setattr(quiet_logger, name, value)
    logs.configure(Settings(), rank=1)
    assert not quiet_logger.handlers
    logs.configure(Settings(log_level=logging.INFO, ignored=("HOROVOD_CYCLE_TIME",)), rank=1)
    quiet_logger.info("here")
    quiet_logger.debug("not here")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("rank 1, INFO] here")


def test_what_is_ignored_is_named_once_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        misspelt = (("DEAR_TRESHOLD", "DEAR_THRESHOLD_MB"),)
        logs.configure(Settings(ignored=("HOROVOD_CYCLE_TIME", "HOROVOD_AUTOTUNE"), misspelt=misspelt), rank)
    assert len(caplog.messages) == 2
    assert caplog.messages[0].endswith("HOROVOD_CYCLE_TIME, HOROVOD_AUTOTUNE")
    assert caplog.messages[1].endswith("DEAR_TRESHOLD has no effect: is DEAR_THRESHOLD_MB meant?")
