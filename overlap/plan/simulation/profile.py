"""Profiles, which are data files: how long each layer of a model takes on a device, and its gradients' bytes.

A file ``profiles/MODEL@DEVICE-BATCH.json`` holds where its numbers come from and a list of layers in order of forward:
name, milliseconds of forward and of backward, bytes of each gradient.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from overlap.plan.simulation.workload import Layer

__all__ = ["FOLDER", "Profile", "from_text", "known", "load", "to_text", "write"]

FOLDER = Path(__file__).resolve().parent / "profiles"


@dataclass(frozen=True, slots=True)
class Profile:
    """The layers of `model` on `device`; `source` says whether they were measured, or derived and how."""

    model: str
    device: str
    batch_size: int
    source: str
    layers: tuple[Layer, ...]

    @property
    def seconds(self) -> float:
        """The seconds of a step's forward and backward."""
        return sum(layer.forward + layer.backward for layer in self.layers)


def path_of(model: str, device: str, batch_size: int) -> Path:
    return FOLDER / f"{model}@{device}-{batch_size}.json"


def known() -> list[str]:
    """The profiles that there are, as MODEL@DEVICE:BATCH."""
    return sorted(":".join(path.stem.rsplit("-", 1)) for path in FOLDER.glob("*.json"))


def load(model: str, device: str, batch_size: int) -> Profile:
    """Load a profile; raises ``ValueError`` where there is no such file, with the names of the model's others."""
    path = path_of(model, device, batch_size)
    if not path.exists():
        others = [name for name in known() if name.startswith(f"{model}@")]
        raise ValueError(
            f"there is no profile of {model}@{device}:{batch_size}; there are {', '.join(others) or 'none of this model'}. "
            f"In dear's repository, derive one: python -m bench.emulation.derive {model} --device {device} --batch-size "
            f"{batch_size}"
        )
    return from_text(path.read_text())


def from_text(text: str) -> Profile:
    """The profile in a text that :func:`to_text` wrote. Raises ``ValueError`` for anything else."""
    try:
        data = json.loads(text)
        layers = tuple(
            Layer(str(name), forward / 1e3, backward / 1e3, tuple(int(size) for size in sizes))
            for name, forward, backward, sizes in data["layers"]
        )
        about = (str(data["model"]), str(data["device"]), int(data["batch_size"]), str(data["source"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is no profile: {type(error).__name__}: {error}") from error
    if not any(layer.forward + layer.backward > 0 for layer in layers):
        raise ValueError("this is no profile: it has no layers that take any time")
    return Profile(*about, layers)


def to_text(profile: Profile) -> str:
    """The profile as text, a layer a line; times are rounded to a tenth of a microsecond."""
    about = {name: getattr(profile, name) for name in ("model", "device", "batch_size", "source")}
    layers = [
        json.dumps([layer.name, round(layer.forward * 1e3, 4), round(layer.backward * 1e3, 4), list(layer.tensors)])
        for layer in profile.layers
    ]
    return json.dumps(about, indent=1)[:-2] + ',\n "layers": [\n  ' + ",\n  ".join(layers) + "\n ]\n}\n"


def write(profile: Profile) -> Path:
    """Write the profile where :func:`load` finds it."""
    path = path_of(profile.model, profile.device, profile.batch_size)
    path.write_text(to_text(profile))
    return path
