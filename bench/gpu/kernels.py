"""Our CUDA kernels on this machine's GPU: results against torch in fp64, bandwidth beside that of a copy.

``python -m bench.gpu.kernels --json kernels.json``
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.program import at_least
from overlap.transport.cuda.math import cast_scale, inspect, kernels_on

__all__ = ["main"]

_CASTS = (
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
)
_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_BAR = 0.85  # of the bandwidth of a copy
_CALLS = 10  # between two events: the host, which takes longer to launch than a small kernel runs, gets ahead meanwhile
_CHECKED = 2**22 + 5  # elements whose results are compared; the CPU would take minutes for all that are timed


def _milliseconds(call: Callable[[], object], repeat: int) -> float:
    """Of one call: the median of `repeat` samples, by events."""
    call()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / _CALLS)
    return statistics.median(times)


def _rate(nbytes: int, milliseconds: float) -> float:
    """GB/s."""
    return nbytes / milliseconds / 1e6


def _check_cast(source: torch.Tensor, dtype: torch.dtype, scale: float) -> bool:
    """Whether every bit is that of torch's own way on the CPU, which tests compare with fp64."""
    target, host = torch.empty_like(source, dtype=dtype), source.cpu()
    expected = torch.empty_like(host, dtype=dtype)
    cast_scale([target], [source], scale)
    cast_scale([expected], [host], scale)
    there = target.cpu()
    same = (there == expected) & (torch.signbit(there) == torch.signbit(expected))
    return bool((same | (there.isnan() & expected.isnan())).all())


def measure(numel: int, repeat: int) -> Iterator[dict[str, Any]]:
    """One row per kernel and type, as they come."""
    checked = min(numel, _CHECKED)
    room = torch.randn(checked + 1, device="cuda", dtype=torch.float64)
    for index, value in enumerate(("inf", "-inf", "nan", "-0.0", "1e-42")):
        room[7 * index + 2] = float(value)
    copied = torch.randn(numel, device="cuda")
    place = torch.empty_like(copied)
    copy_rate = _rate(2 * copied.nbytes, _milliseconds(lambda: place.copy_(copied), repeat))
    yield {"kernel": "copy of float32 by torch", "gb_per_s": copy_rate}
    for narrow, wide in _CASTS:
        good = all(
            _check_cast(room.to(narrow)[start : checked + start], wide, s) for start in (0, 1) for s in (1.0, 0.3)
        )
        source = copied.to(narrow)
        target = torch.empty_like(source, dtype=wide)
        spent = _milliseconds(lambda t=target, s=source: cast_scale([t], [s], 0.5), repeat)  # type: ignore[misc]
        rate = _rate(source.nbytes + target.nbytes, spent)
        yield _row(f"cast {narrow} to {wide}", good, rate, copy_rate)
    for dtype in _TYPES:
        clean = copied.to(dtype)
        good = True
        for start in (0, 1):
            part = clean[start:checked]
            squares, nonfinite = inspect([part]).tolist()
            expected = float(part.double().square().sum())
            good &= nonfinite == 0 and abs(squares - expected) <= 1e-12 * expected
        dirty = clean[:checked].clone()
        dirty[[3, checked // 2, checked - 1]] = torch.tensor(
            [float("inf"), float("nan"), -float("inf")], device="cuda"
        ).to(dtype)
        good &= float(inspect([dirty])[1]) == 3
        spent = _milliseconds(lambda c=clean: inspect([c]), repeat)  # type: ignore[misc]
        yield _row(f"inspect {dtype}", good, _rate(numel * clean.element_size(), spent), copy_rate)


def _row(kernel: str, good: bool, rate: float, copy_rate: float) -> dict[str, Any]:
    share = rate / copy_rate
    return {"kernel": kernel, "right": good, "gb_per_s": rate, "of_copy": share, "meets_bar": share >= _BAR}


def main(arguments: list[str] | None = None) -> int:
    """Run all kernels; returns 0 where every result is right.

    The bar of 85 % of a copy is reported, not enforced, since it depends on `--numel`.
    """
    parser = argparse.ArgumentParser(prog="bench.gpu.kernels", description=__doc__)
    parser.add_argument("--numel", type=at_least(64), default=2**26, help="elements of what is timed")
    parser.add_argument("--repeat", type=at_least(1), default=20)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available() or kernels_on(torch.cuda.current_device()) is None:
        print(
            "bench.gpu.kernels: no GPU, or the kernels cannot be used; DEAR_LOG_LEVEL=info tells why", file=sys.stderr
        )
        return 2
    about, rows = {"card": torch.cuda.get_device_name(), "numel": chosen.numel}, []
    for row in measure(chosen.numel, chosen.repeat):
        rows.append(row)
        print(", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
        if chosen.json is not None:  # after every row: this may be stopped
            chosen.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return int(not all(row.get("right", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
