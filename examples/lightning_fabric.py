"""Your own loop under Lightning's Fabric, on all workers of the job: only the strategy is dear's.

dearrun -np 2 python examples/lightning_fabric.py --devices 2
"""

from __future__ import annotations

import argparse

import lightning
import torch
from lightning_module import AutoEncoder, signals
from torch.nn import functional
from torch.utils.data import DataLoader

from dear.integrations.lightning import DearFabricStrategy


def main(argv: list[str] | None = None) -> float:
    """The mean loss of the last epoch, over all workers."""
    parser = argparse.ArgumentParser(description="A loop of Fabric over dear")
    parser.add_argument("--devices", type=int, default=1, help="workers on each host: as many as the launcher started")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(argv)
    fabric = lightning.Fabric(accelerator="cpu", strategy=DearFabricStrategy(), devices=options.devices)
    fabric.launch()
    model = AutoEncoder()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(signals(560, seed=1), 16, shuffle=True))
    mean = torch.zeros(())
    for epoch in range(options.epochs):
        mean.zero_()
        for (batch,) in loader:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(batch), batch)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            mean += loss.detach() / len(loader)
        fabric.all_reduce(mean)
        fabric.print(f"epoch {epoch + 1}: loss {mean:.4f}")
    return float(mean)


if __name__ == "__main__":
    main()
