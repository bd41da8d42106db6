"""How long each layer of a model takes on an accelerator: data files, read here (pure).

A file ``profiles/MODEL@DEVICE-BATCH.json`` holds where its numbers come from and a list of layers in order of forward,
each with the milliseconds of its forward and its backward.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["EVEN", "FOLDER", "Layer", "Profile", "even", "known", "load", "parse_spec", "to_text", "write"]

FOLDER = Path(__file__).resolve().parent / "profiles"
EVEN = "even"


@dataclass(frozen=True)
class Layer:
    """A module that owns parameters, and what follows it until the next one starts."""

    name: str
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class Profile:
    model: str
    device: str
    batch_size: int
    source: str  # measured, or derived and how
    layers: tuple[Layer, ...]

    @property
    def milliseconds(self) -> float:
        return sum(layer.forward_ms + layer.backward_ms for layer in self.layers)


def parse_spec(spec: str) -> tuple[str, str, float | None]:
    """``"resnet50@a100:64"`` to ``("resnet50", "a100", 64.0)``; the number may be left out, except for ``even``."""
    model, at, rest = spec.partition("@")
    device, colon, number = rest.partition(":")
    if not (model and at and device):
        raise ValueError(
            f"an emulated accelerator is written MODEL@DEVICE[:BATCH], e.g. resnet50@a100:64, not {spec!r}"
        )
    try:
        value = float(number) if colon else None
    except ValueError:
        raise ValueError(f"after the colon of {spec!r} a number is expected, not {number!r}") from None
    if value is not None and not value > 0:
        raise ValueError(f"the number of {spec!r} should be above 0")
    if device == EVEN and value is None:
        raise ValueError(f"{model}@{EVEN} needs the milliseconds of a whole step, e.g. {model}@{EVEN}:640")
    return model, device, value


def even(model: str, names: Sequence[str], milliseconds: float) -> Profile:
    """Every layer takes the same time, a third of it in forward."""
    each = milliseconds / len(names) / 3
    layers = tuple(Layer(name, each, 2 * each) for name in names)
    return Profile(model, EVEN, 0, f"{milliseconds:g} ms spread evenly, forward : backward = 1 : 2", layers)


def _path(model: str, device: str, batch_size: int) -> Path:
    return FOLDER / f"{model}@{device}-{batch_size}.json"


def known() -> list[str]:
    """What can be asked for, as MODEL@DEVICE:BATCH."""
    return sorted(":".join(path.stem.rsplit("-", 1)) for path in FOLDER.glob("*.json"))


def load(model: str, device: str, batch_size: int) -> Profile:
    """Raises ``ValueError`` where there is no such file, naming those of the model."""
    path = _path(model, device, batch_size)
    if not path.exists():
        others = [name for name in known() if name.startswith(f"{model}@")]
        raise ValueError(
            f"there is no profile of {model}@{device}:{batch_size}; there are {', '.join(others) or 'none of this model'}. "
            f"Derive one: python -m bench.emulation.derive {model} --device {device} --batch-size {batch_size}"
        )
    data = json.loads(path.read_text())
    layers = tuple(Layer(name, forward, backward) for name, forward, backward in data.pop("layers"))
    return Profile(**data, layers=layers)


def to_text(profile: Profile) -> str:
    """As :func:`load` reads it, a layer a line."""
    about = asdict(profile)
    layers = [json.dumps([layer["name"], layer["forward_ms"], layer["backward_ms"]]) for layer in about.pop("layers")]
    head = json.dumps(about, indent=1)[:-2]
    return head + ',\n "layers": [\n  ' + ",\n  ".join(layers) + "\n ]\n}\n"


def write(profile: Profile) -> Path:
    """Write the profile where :func:`load` finds it."""
    path = _path(profile.model, profile.device, profile.batch_size)
    path.write_text(to_text(profile))
    return path
