"""What is carried to a machine without a network: a library loses the code of other cards, and nothing else."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from bench.gpu import carry
from bench.gpu.carry import others_code, pruned
from comm_core.cuda_kernels import image_path, image_targets

PTX, MACHINE_CODE = 1, 2


def _entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", architecture)
    return header.ljust(64, b"\1") + code


def _image(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


LOOKS_SO = struct.pack("<IHHQ", 0xBA55ED50, 7, 7, 7)


def test_code_of_other_cards_becomes_zeros() -> None:
    first = _image(
        _entry(MACHINE_CODE, 80, b"ampere"), _entry(MACHINE_CODE, 90, b"hopper"), _entry(PTX, 90, b"text of hopper")
    )
    second = _image(_entry(MACHINE_CODE, 90, b"more"), _entry(MACHINE_CODE, 100, b"blackwell"))
    library = b"\x7fELF" + LOOKS_SO + first + b"data" + second + b"end"
    found = pruned(library, 90)
    assert found == library.replace(b"ampere", bytes(6)).replace(b"text of hopper", bytes(14)).replace(
        b"blackwell", bytes(9)
    )
    assert image_targets(first) == ["compute_90", "sm_80", "sm_90"], "it is one as comm_core reads them"
    assert pruned(b"no library", 90) == b"no library"
    assert list(others_code(_image(bytes(64)), 90)) == []


def test_our_own_kernels_can_be_pruned() -> None:
    path = image_path()
    if path is None:
        pytest.skip("comm_core was built without nvcc")
    image = path.read_bytes()
    found = pruned(image, 90)
    assert len(found) == len(image)
    assert image_targets(found) == image_targets(image), "headers stay"
    kept = sum(end - begin for begin, end in others_code(image, 90))
    assert 0 < kept < len(image)
    assert found.count(0) > image.count(0)


def test_what_is_too_large_or_missing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(carry, "_download", lambda folder, *names: (folder / "a.whl").write_bytes(bytes(2_000_000)))
    monkeypatch.setattr(carry, "_nccl", lambda folder, work: None)
    assert carry.main([str(tmp_path)]) == 0
    assert "   2.0 MB of 60" in capsys.readouterr().out
    monkeypatch.setattr(carry, "_MOST_BYTES", 10**6)
    assert carry.main([str(tmp_path)]) == 1

    def missing(folder: Path, work: Path) -> None:
        raise FileNotFoundError("no such wheel")

    monkeypatch.setattr(carry, "_nccl", missing)
    assert carry.main([str(tmp_path)]) == 1
    assert "no such wheel" in capsys.readouterr().err
