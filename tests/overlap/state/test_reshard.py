"""What of the optimizer's state travels whole to other ranks."""

from __future__ import annotations

import pickle

import torch

from overlap.state.reshard import packed, unpacked


class _There(torch.Tensor):
    """On a device that no other rank calls so."""

    device = torch.device("cuda", 3)

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return torch.tensor(self.item())


def test_a_scalar_of_a_device_goes_where_the_parameter_is() -> None:
    """As ``step`` of Adam with ``fused=True`` or ``capturable=True``."""
    sent = pickle.loads(pickle.dumps(packed(torch.tensor(7.0).as_subclass(_There))))
    assert unpacked(sent, torch.empty(2, device="meta")).device.type == "meta"
    assert unpacked(sent, torch.empty(2)).item() == 7.0


def test_what_is_on_the_host_stays_there() -> None:
    value = torch.tensor(7.0)
    kept = unpacked(packed(value), torch.empty(2, device="meta"))
    assert kept.device.type == "cpu"
    assert kept == value
    assert kept is not value
    assert unpacked(packed("text"), torch.empty(2)) == "text"
