"""Handwritten digits as tensors: the ones that come with scikit-learn, or MNIST's four IDX files."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
# Name without .gz, and the SHA-256 of the compressed file.
FILES = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


class DataError(ValueError):
    """The data cannot be had, or is not what it should be; the message says which file and what to do."""


@dataclass(frozen=True)
class Digits:
    """Images as floats in [0, 1] of shape (n, 1, height, width), and labels 0 to 9."""

    name: str
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def embedded() -> Digits:
    """The 1,797 digits of 8 x 8 pixels in scikit-learn; the split is the same everywhere and always."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images.astype(np.float32) / 16).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))  # a stream numpy promises to keep
    test, train = order[:360], order[360:]
    return Digits("scikit-learn's digits", images[train], labels[train], images[test], labels[test])


def mnist(folder: Path) -> Digits:
    """MNIST from its four IDX files in `folder`, each plain or gzipped."""
    train_images, train_labels, test_images, test_labels = (_find(folder, name) for name in FILES)
    train = _images(train_images), _labels(train_labels)
    test = _images(test_images), _labels(test_labels)
    for (images, labels), path in ((train, train_images), (test, test_images)):
        if len(images) != len(labels):
            raise DataError(f"{path} holds {len(images)} images, and its labels' file {len(labels)} labels")
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(f"{train_images} and {test_images} hold images of different sizes")
    return Digits(f"MNIST from {folder}", *train, *test)


def download(folder: Path) -> None:
    """Put the four files into `folder`; one that is there with the right checksum is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, checksum in FILES.items():
        target = folder / f"{name}.gz"
        if target.exists() and _sha256(target.read_bytes()) == checksum:
            continue
        content = _fetch(f"{name}.gz", checksum)
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        partial.write_bytes(content)
        partial.replace(target)


def _fetch(name: str, checksum: str) -> bytes:
    problems = []
    for mirror in MIRRORS:
        try:
            with urllib.request.urlopen(mirror + name, timeout=20) as response:
                content: bytes = response.read()
        except OSError as error:  # URLError and timeouts are OSErrors
            problems.append(f"{mirror}{name}: {error}")
            continue
        if _sha256(content) == checksum:
            return content
        problems.append(f"{mirror}{name}: SHA-256 is {_sha256(content)} and should be {checksum}")
    raise DataError(
        "MNIST could not be downloaded: "
        + "; ".join(problems)
        + ". Give the four files with --data-dir, or leave out --download to train on the embedded digits"
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _find(folder: Path, name: str) -> Path:
    dotted = name.replace("-idx", ".idx")  # as some archives spell it
    for candidate in (name, f"{name}.gz", dotted, f"{dotted}.gz"):
        if (folder / candidate).is_file():
            return folder / candidate
    raise DataError(f"{folder} holds no {name} or {name}.gz; --download fetches the four files")


def _images(path: Path) -> torch.Tensor:
    return torch.from_numpy(_read(path, dimensions=3).astype(np.float32) / 255).unsqueeze(1)


def _labels(path: Path) -> torch.Tensor:
    labels = _read(path, dimensions=1).astype(np.int64)
    if labels.max() > 9:
        raise DataError(f"{path} holds the label {labels.max()}; labels are 0 to 9")
    return torch.from_numpy(labels)


def _read(path: Path, dimensions: int) -> np.ndarray:
    """The array in an IDX file: 0, 0, type (8: unsigned byte), number of dimensions, sizes, bytes."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    start = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) < start:
        raise DataError(
            f"{path} is no IDX file of bytes in {dimensions} dimension(s); it begins {content[:4].hex(' ')}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape) or 0 in shape:
        raise DataError(f"{path} says it holds {' x '.join(map(str, shape))} bytes, and holds {len(content) - start}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
