"""``python -m bench.emulation.derive resnet50 --device a100``: a profile from arithmetic, where nothing was measured.

Every operation of one forward pass takes the longer of its floating-point operations at the device's rate and its bytes
(inputs and outputs, once) at the device's bandwidth, plus a constant for its launch. Backward takes twice as long: it
computes one gradient for the inputs and one for the weights. What runs between the start of a module with parameters and
the next one's counts for the former.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bench.emulation.accelerator import gradient_bytes, owners
from bench.models.catalog import MODELS, workload
from overlap.plan.simulation.profile import Profile, write
from overlap.plan.simulation.workload import Layer

__all__ = ["DEVICES", "Device", "derive"]


@dataclass(frozen=True)
class Device:
    """Rates from the vendor's data sheet, and the assumed share of them that real programs reach."""

    flops: float
    bytes: float
    compute_share: float
    memory_share: float
    launch_seconds: float

    def seconds(self, flops: float, nbytes: float) -> float:
        return (
            max(flops / (self.flops * self.compute_share), nbytes / (self.bytes * self.memory_share))
            + self.launch_seconds
        )


DEVICES = {
    # fp32 with TF32 tensor cores: 156 TFLOP/s; 40 GB model: 1,555 GB/s
    "a100": Device(156e12, 1555e9, 0.5, 0.8, 5e-6),
    # fp32: 13.45 TFLOP/s; 616 GB/s
    "rtx2080ti": Device(13.45e12, 616e9, 0.7, 0.8, 5e-6),
}


class _Roofline(TorchDispatchMode):
    """Adds the time of every operation to the module that started last."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.current = ""
        self.seconds: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.current and not func.is_view:
            flat, _ = torch.utils._pytree.tree_flatten((args, kwargs, out))
            nbytes = sum(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + self._device.seconds(flops, nbytes)
        return out


def derive(model_name: str, device_name: str, batch_size: int, size: int) -> Profile:
    """The profile of a model at a batch size on a device of :data:`DEVICES`."""
    chosen, device = workload(model_name), DEVICES[device_name]
    place = torch.device("cpu" if model_name == "gpt2" else "meta")  # transformers' GPT-2 looks at values
    with torch.device("meta"):
        model = chosen.build()
    names, sizes = [name for name, _, _ in owners(model)], gradient_bytes(model)
    if place.type != "meta":
        model.to_empty(device=place)  # unties what is tied, so the names are taken before
    batch = tuple(part.to(place) for part in chosen.batch(batch_size, size, torch.Generator().manual_seed(1)))
    roofline = _Roofline(device)

    def start(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            roofline.current = name

        return hook

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(start(name))
    with torch.no_grad(), roofline:
        chosen.loss(model, batch)
    layers = []
    for name in names:
        forward = roofline.seconds.get(name, 0.0)
        layers.append(Layer(name, forward, 2 * forward, sizes[name]))
    source = (
        f"derived, not measured: inputs of size {size}; per operation the longer of FLOPs at {device.compute_share:g} x "
        f"{device.flops / 1e12:g} TFLOP/s and bytes at {device.memory_share:g} x {device.bytes / 1e9:g} GB/s, plus "
        f"{device.launch_seconds * 1e6:g} us; backward twice forward (python -m bench.emulation.derive)"
    )
    return Profile(model_name, device_name, batch_size, source, tuple(layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--device", choices=list(DEVICES), default="a100")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--size", type=int, help="edge of a picture, or words of a sentence (default: the model's own)")
    arguments = parser.parse_args()
    chosen = workload(arguments.model)
    size, batch_size = arguments.size or chosen.size, arguments.batch_size or chosen.batch_size
    profile = derive(arguments.model, arguments.device, batch_size, size)
    print(f"{write(profile)}: {1e3 * profile.seconds:.1f} ms a step, {batch_size / profile.seconds:.0f} samples/s")


if __name__ == "__main__":
    main()
