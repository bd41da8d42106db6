"""A Horovod script for handwritten digits. The only line that is not Horovod's is the import.

scripts/mpirun -np 2 .venv/bin/python examples/horovod_mnist.py --fp16-allreduce --gradient-predivide-factor 2
.venv/bin/torchrun --nproc-per-node 2 examples/horovod_mnist.py --use-mixed-precision
"""

from __future__ import annotations

import argparse

import mnist_data
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dear as hvd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 3, padding=1)
        self.conv2 = nn.Conv2d(10, 20, 3, padding=1)
        self.drop = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(20 * 2 * 2, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.drop(self.conv2(x)), 2))
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(x.flatten(1)))), dim=1)


def metric_average(value: float, name: str) -> float:
    return float(hvd.allreduce(torch.tensor(value), name=name))


def train(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    scaler: torch.amp.GradScaler,
    epoch: int,
) -> None:
    model.train()
    loader.sampler.set_epoch(epoch)
    for index, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=args.use_mixed_precision):
            loss = functional.nll_loss(model(data).float(), target)
        scaler.scale(loss).backward()
        optimizer.synchronize()  # so that the scaler sees averages
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        if index % args.log_interval == 0 and hvd.rank() == 0:
            print(f"epoch {epoch} [{index * len(data)}/{len(loader.sampler)}]  loss {loss.item():.4f}", flush=True)


def test(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    loss, accuracy = 0.0, 0.0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += functional.nll_loss(output, target, reduction="sum").item()
            accuracy += (output.argmax(1) == target).float().sum().item()
    loss = metric_average(loss / len(loader.sampler), "avg_loss")
    accuracy = metric_average(accuracy / len(loader.sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"test set: average loss {loss:.4f}, accuracy {accuracy:.2%}", flush=True)
    return accuracy


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Horovod's kind of digits example")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one worker in a step")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel in 16 bits")
    parser.add_argument("--use-mixed-precision", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--small", action="store_true", help="other defaults: three short epochs")
    if parser.parse_args(argv).small:
        parser.set_defaults(epochs=3, batch_size=16, momentum=0.9)  # what the command line gives counts
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> float:
    args = arguments(argv)

    hvd.init()
    torch.manual_seed(args.seed)
    digits = mnist_data.embedded()
    train_set = TensorDataset(digits.train_images, digits.train_labels)
    test_set = TensorDataset(digits.test_images, digits.test_labels)
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=500, sampler=test_sampler)

    model = Net()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    scaler = torch.amp.GradScaler("cpu", enabled=args.use_mixed_precision)
    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        train(args, model, optimizer, train_loader, scaler, epoch)
        accuracy = test(model, test_loader)
    return accuracy


if __name__ == "__main__":
    main()
