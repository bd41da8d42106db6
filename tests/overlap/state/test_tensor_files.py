"""Files of tensors are those of safetensors, either way, and ranges are read out of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from overlap.state.tensor_files import (
    INDEX,
    Described,
    Place,
    find,
    index_of,
    map_tensor,
    plan_files,
    read_range,
    remove_others,
    write,
)

safetensors = pytest.importorskip("safetensors.torch")

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
)


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {
        f"t{number}": torch.randn(3, 5, generator=generator).mul(9).to(dtype) for number, dtype in enumerate(DTYPES)
    }
    made["none"] = torch.empty(0, 4)
    made["number"] = torch.tensor(2.5)
    made["turned"] = torch.randn(4, 6, generator=generator).t()
    return made


def _described(tensors: dict[str, torch.Tensor]) -> dict[str, Described]:
    return {name: Described(tuple(value.shape), value.dtype) for name, value in tensors.items()}


def _same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    tensors = _tensors()
    write(tmp_path / "model.safetensors", list(tensors), _described(tensors), tensors.__getitem__)
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in found.items():
        _same(value, tensors[name])
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_safetensors_has_written_is_read(tmp_path: Path) -> None:
    tensors = {name: value.contiguous() for name, value in _tensors().items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    places = find(tmp_path)
    assert places.keys() == tensors.keys()
    for name, value in tensors.items():
        flat = value.view(-1)
        for start, stop in ((0, flat.numel()), (flat.numel() // 3, flat.numel() // 2), (0, 0)):
            into = torch.empty(stop - start, dtype=value.dtype)
            read_range(places[name], start, stop, into)
            _same(into, flat[start:stop])


def test_long_tensors_are_read_and_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap.state.tensor_files._SEGMENT", 40)
    tensors = {"a": torch.randn(7, 11), "b": torch.randn(50, dtype=torch.float64)}
    write(tmp_path / "one", list(tensors), _described(tensors), tensors.__getitem__)
    found = safetensors.load_file(tmp_path / "one")
    for name, value in tensors.items():
        _same(found[name], value)
    into = torch.empty(60, dtype=torch.float64)
    read_range(find(tmp_path / "one")["a"], 13, 73, into)
    assert torch.equal(into, tensors["a"].view(-1)[13:73].double())


def test_values_are_rounded_to_what_is_described(tmp_path: Path) -> None:
    value = torch.randn(9)
    write(tmp_path / "one", ["a"], {"a": Described((9,), torch.bfloat16)}, lambda _name: value)
    _same(safetensors.load_file(tmp_path / "one")["a"], value.bfloat16())


def test_files_have_at_most_so_many_bytes_or_one_tensor() -> None:
    tensors = {
        name: Described((size,), torch.uint8) for name, size in (("a", 4), ("b", 5), ("c", 20), ("d", 1), ("e", 9))
    }
    assert plan_files(tensors, 10) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d", "e"],
    }
    assert plan_files(tensors, 39) == {"model.safetensors": list("abcde")}
    assert plan_files({}, 1) == {"model.safetensors": []}
    with pytest.raises(ValueError, match=r"'x' is torch.complex128, which safetensors files do not have"):
        plan_files({"x": Described((), torch.complex128)}, 1)


def test_several_files_are_found_by_their_index(tmp_path: Path) -> None:
    tensors = _tensors()
    described = _described(tensors)
    files = plan_files(described, 100)
    assert len(files) > 3
    for file, names in files.items():
        write(tmp_path / file, names, described, tensors.__getitem__)
    (tmp_path / INDEX).write_text(index_of(files, described))
    assert find(tmp_path).keys() == tensors.keys()
    told = json.loads((tmp_path / INDEX).read_text())
    assert told["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert told["metadata"]["total_parameters"] == sum(value.numel() for value in tensors.values())


def test_what_was_there_before_is_removed(tmp_path: Path) -> None:
    for name in ("model.safetensors", INDEX, "model-00001-of-00002.safetensors", "other.safetensors", "config.json"):
        (tmp_path / name).touch()
    remove_others(tmp_path, ["model.safetensors"])
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "other.safetensors", "config.json"}


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no .*model.safetensors, nor"):
        find(tmp_path)
    for content in (b"", b"abc", b"\0" * 100, b"\xff" * 100):
        (tmp_path / "x.pt").write_bytes(content)
        with pytest.raises(ValueError, match="is no file of safetensors"):
            find(tmp_path / "x.pt")
    write(tmp_path / "cut", ["a"], {"a": Described((9,), torch.float32)}, lambda _name: torch.ones(9))
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-4])
    with pytest.raises(ValueError, match="ends before its last tensor does"):
        read_range(find(tmp_path / "cut")["a"], 0, 9, torch.empty(9))


def test_tensors_are_mapped_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    tensors, path = _tensors(), tmp_path / "model.safetensors"
    del tensors["none"]  # no bytes, which cannot be mapped
    write(path, list(tensors), _described(tensors), tensors.__getitem__)
    content, files = path.read_bytes(), {}  # type: ignore[var-annotated]
    for name, place in find(path).items():
        storage = map_tensor(place, files)
        assert storage is not None, name
        found = torch.empty(0, dtype=place.dtype).set_(storage).view(place.shape)  # type: ignore[call-overload]
        assert found.untyped_storage().nbytes() == place.nbytes
        _same(found, tensors[name])
        found.zero_()
    assert list(files) == [path]
    assert path.read_bytes() == content
    path.unlink()
    assert not found.any(), "what is mapped stays"


def test_what_cannot_be_mapped_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(64))
    assert map_tensor(Place(path, (4,), torch.float32, 48), {}) is not None
    assert map_tensor(Place(path, (4,), torch.float32, 46), {}) is None, "not aligned to its elements"
    assert map_tensor(Place(path, (4,), torch.float32, 52), {}) is None, "the file ends before it does"


def test_what_is_written_is_aligned_for_who_maps_it(tmp_path: Path) -> None:
    for length in range(70):
        tensors = {"x" * (length + 1): torch.ones(3)}
        write(tmp_path / "one", list(tensors), _described(tensors), tensors.__getitem__)
        (place,) = find(tmp_path / "one").values()
        assert place.start % 64 == 0
