"""Ray Train starts the workers; dear.init() takes the torch.distributed world that it has initialised in each.

.venv/bin/python examples/ray_train.py --workers 2
"""

from __future__ import annotations

import argparse
import tempfile

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, report
from ray.train.torch import TorchTrainer

import dear


def train(config: dict[str, int]) -> None:
    """On every worker."""
    dear.init()
    torch.manual_seed(dear.rank())  # every worker draws its own samples
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    for epoch in range(config["epochs"]):
        for _ in range(50):
            inputs = torch.randn(32, 10)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = {"epoch": epoch, "loss": dear.allreduce(loss.detach()).item(), "workers": dear.size()}
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if dear.rank() == 0:
                torch.save(model.state_dict(), f"{folder}/model.pt")
                kept = Checkpoint.from_directory(folder)
            report(metrics, checkpoint=kept)  # on every worker
    dear.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", help="a folder that all hosts see, for what Ray keeps")
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(storage_path=args.storage),
    )
    result = trainer.fit()
    print(f"{result.checkpoint.path}: {result.metrics}")
    ray.shutdown()
