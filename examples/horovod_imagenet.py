"""A Horovod script for image classification: warm-up, checkpoints, resuming, averaged metrics. Only the import is ours.

The images are made up (each class is a pattern under noise), the network a small residual one with bottlenecks.

scripts/mpirun -np 2 .venv/bin/python examples/horovod_imagenet.py --small
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import checkpoint_file
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dear as hvd


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut, which is projected where shapes differ."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def network(depths: tuple[int, ...], width: int, classes: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Bottleneck(inputs, width * 2**stage, 2 if block == 0 and stage else 1))
            inputs = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def pictures(count: int, side: int, classes: int, seed: int) -> TensorDataset:
    patterns = torch.randn(classes, 3, side, side, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    return TensorDataset(patterns[labels] + torch.randn(count, 3, side, side, generator=generator), labels)


class Metric:
    """The mean of a number over all workers' samples."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum, self.count = torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value: torch.Tensor, samples: int) -> None:
        self.sum += hvd.allreduce(value.detach() * samples, name=self.name, op=hvd.Sum)
        self.count += hvd.allreduce(torch.tensor(float(samples)), name=self.name + ".count", op=hvd.Sum)

    @property
    def average(self) -> float:
        return float(self.sum / self.count)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def adjust_learning_rate(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer, epoch: int, index: int, steps: int
) -> None:
    """From the rate of one worker to the rate of all during the warm-up, then down in jumps (Goyal et al., 2017)."""
    workers = hvd.size() * args.batches_per_allreduce
    if epoch < args.warmup_epochs:
        progress = (epoch + (index + 1) / steps) / args.warmup_epochs
        factor = (progress * (workers - 1) + 1) / workers
    else:
        factor = 0.1 ** sum(epoch >= milestone * args.epochs for milestone in (0.5, 0.75))
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * workers * factor


def train(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, epoch: int
) -> float:
    model.train()
    loader.sampler.set_epoch(epoch)
    loss_metric, accuracy_metric = Metric("train_loss"), Metric("train_accuracy")
    for index, (data, target) in enumerate(loader):
        adjust_learning_rate(args, optimizer, epoch, index, len(loader))
        optimizer.zero_grad()
        for start in range(0, len(data), args.batch_size):  # the last batch of an epoch may hold fewer parts
            part, labels = data[start : start + args.batch_size], target[start : start + args.batch_size]
            output = model(part)
            loss = functional.cross_entropy(output, labels)
            loss_metric.update(loss, len(part))
            accuracy_metric.update(accuracy(output, labels), len(part))
            (loss / math.ceil(len(data) / args.batch_size)).backward()
        optimizer.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss_metric.average:.4f}, accuracy {accuracy_metric.average:.2%}", flush=True)
    return loss_metric.average


def validate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    metric = Metric("val_accuracy")
    with torch.no_grad():
        for data, target in loader:
            metric.update(accuracy(model(data), target), len(data))
    if hvd.rank() == 0:
        print(f"         validation accuracy {metric.average:.2%}", flush=True)
    return metric.average


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Horovod's kind of ImageNet example, on made-up pictures")
    parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pth.tar")
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--batches-per-allreduce", type=int, default=1, help="batches of a worker before each step")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--base-lr", type=float, default=0.0125)
    parser.add_argument("--warmup-epochs", type=float, default=2)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--small", action="store_true", help="seconds: smaller pictures, fewer layers, other defaults")
    if parser.parse_args(argv).small:
        parser.set_defaults(batch_size=8, warmup_epochs=1)  # what the command line gives counts
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    args = arguments(argv)
    side, count, depths, width, classes = 32, 4096, (3, 4, 6, 3), 16, 100
    if args.small:
        side, count, depths, width, classes = 8, 96, (1, 1), 4, 4

    hvd.init()
    torch.manual_seed(args.seed)
    resume_from_epoch = 0
    for epoch in range(args.epochs, 0, -1):
        if os.path.exists(args.checkpoint_format.format(epoch=epoch)):
            resume_from_epoch = epoch
            break
    resume_from_epoch = int(hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"))

    train_set, val_set = pictures(count, side, classes, 1), pictures(count // 4, side, classes, 2)
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    val_sampler = DistributedSampler(val_set, num_replicas=hvd.size(), rank=hvd.rank())
    in_a_step = args.batch_size * args.batches_per_allreduce
    train_loader = DataLoader(train_set, batch_size=in_a_step, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=args.batch_size, sampler=val_sampler)

    model = network(depths, width, classes)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=args.base_lr, momentum=args.momentum, weight_decay=args.wd
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
    )
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    score = 0.0
    for epoch in range(resume_from_epoch, args.epochs):
        train(args, model, optimizer, train_loader, epoch)
        score = validate(model, val_loader)
        if hvd.rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint_file.save(Path(args.checkpoint_format.format(epoch=epoch + 1)), state)
    return score, model.state_dict()


if __name__ == "__main__":
    main()
