"""Train a small convolutional network on handwritten digits, on as many workers as it is started on.

bash mnist.sh                                                       # 2 workers over mpirun
.venv/bin/torchrun --nproc-per-node 2 examples/mnist.py --epochs 5
.venv/bin/python examples/mnist.py --data-dir data/mnist --download

Every random number follows from the seed, the epoch and the rank, so a run that is resumed after any epoch takes the
same steps, bit for bit, as one that was never interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import checkpoint_file
import mnist_checkpoint as checkpoint
import mnist_data
import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

import dear

T = TypeVar("T")


class Net(nn.Module):
    """Two convolutions and two linear layers; `side` is the images' height and width."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.hidden = nn.Linear(32 * (side // 2) ** 2, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv1(images))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.hidden(self.dropout(x.flatten(1))))
        logits: torch.Tensor = self.output(x)
        return logits


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train handwritten digits with dear.")
    parser.add_argument("--epochs", type=_positive, default=15)
    parser.add_argument("--batch-size", type=_positive, default=64, help="samples per step, of all workers together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's four IDX files; default: embedded digits")
    parser.add_argument("--download", action="store_true", help="fetch MNIST into --data-dir (default data/mnist)")
    parser.add_argument("--checkpoint", type=Path, help="file to write after every epoch, by rank 0")
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    parser.add_argument("--plot", type=Path, help="picture of the loss and accuracy curves to write")
    args = parser.parse_args(argv)
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint FILE to continue from")
    if args.download and args.data_dir is None:
        args.data_dir = Path("data/mnist")
    return args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"should be at least 1 and is {value}")
    return value


def together(action: Callable[[], T]) -> T:
    """Run `action` on every rank; where it fails on any, rank 0 says why once and all ranks end."""
    value, failure = None, None
    try:
        value = action()
    except (OSError, ValueError) as error:
        failure = str(error)
    failures = [text for text in dear.allgather_object(failure) if text is not None]
    if failures:
        if dear.rank() == 0:
            print(f"mnist.py: {failures[0]}", file=sys.stderr, flush=True)
        dear.barrier()  # the launcher ends all ranks when the first exits; by then rank 0 has spoken
        sys.exit(1)
    return value  # type: ignore[return-value]


def load_data(args: argparse.Namespace) -> mnist_data.Digits:
    if args.data_dir is None:
        return together(mnist_data.embedded)
    if args.download:  # once on every host
        together(lambda: mnist_data.download(args.data_dir) if dear.local_rank() == 0 else None)
    return together(lambda: mnist_data.mnist(args.data_dir))


def local_batches(samples: int, per_rank: int, seed: int) -> list[torch.Tensor]:
    """This rank's part of every batch: all ranks draw the same order and take neighbouring pieces of it."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    step = per_rank * dear.size()
    first = dear.rank() * per_rank
    return [order[start + first : start + first + per_rank] for start in range(0, samples - step + 1, step)]


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: mnist_data.Digits, batches: list[torch.Tensor], bar: Any
) -> tuple[float, float]:
    """Mean loss and accuracy over all ranks' samples, as they were when each batch was trained."""
    model.train()
    totals = torch.zeros(3, dtype=torch.float64)
    for chosen in batches:
        labels = data.train_labels[chosen]
        optimizer.zero_grad()
        logits = model(data.train_images[chosen])
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        totals += torch.tensor([loss.item() * len(labels), (logits.argmax(1) == labels).sum(), len(labels)])
        bar.update()
    loss_sum, correct, count = dear.allreduce(totals, op=dear.Sum).tolist()
    return loss_sum / count, correct / count


@torch.no_grad()
def evaluate(model: nn.Module, data: mnist_data.Digits) -> tuple[float, float]:
    """Mean loss and accuracy on the test set, of which every rank looks at its part."""
    model.eval()
    mine = slice(dear.rank(), None, dear.size())
    totals = torch.zeros(3, dtype=torch.float64)
    for images, labels in zip(data.test_images[mine].split(500), data.test_labels[mine].split(500), strict=True):
        logits = model(images)
        loss = functional.cross_entropy(logits, labels, reduction="sum").item()
        totals += torch.tensor([loss, (logits.argmax(1) == labels).sum(), len(labels)], dtype=torch.float64)
    loss_sum, correct, count = dear.allreduce(totals, op=dear.Sum).tolist()
    return loss_sum / count, correct / count


def plot(path: Path, history: list[dict[str, float]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    epochs = range(1, len(history) + 1)
    for axes, what in ((left, "loss"), (right, "accuracy")):
        for part in ("train", "test"):
            axes.plot(epochs, [entry[f"{part}_{what}"] for entry in history], marker=".", label=part)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel(what)
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    args = parse()
    dear.init()
    talks = dear.rank() == 0
    data = load_data(args)
    per_rank = max(1, args.batch_size // dear.size())
    samples = len(data.train_labels)
    steps = samples // (per_rank * dear.size())
    if steps == 0:
        sys.exit(f"mnist.py: {samples} training samples are fewer than one batch of {per_rank * dear.size()}")

    torch.manual_seed(args.seed)
    model = Net(side=data.train_images.shape[-1])
    optimizer = dear.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=args.lr), model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    settings = {"data": data.name, "seed": args.seed, "batch_size": args.batch_size, "lr": args.lr}
    history: list[dict[str, float]] = []

    if args.resume:
        # Rank 0 reads, since its host alone may hold the file.
        loaded = together(lambda: checkpoint.load(args.checkpoint, settings) if talks else None)
        state = dear.broadcast_object(loaded)
        assert state is not None
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        history = state["history"]
        if talks and state["workers"] != dear.size():
            print(f"the checkpoint was made on {state['workers']} worker(s): continuing, but not bit for bit")

    if talks:
        print(f"{data.name}: {samples} to train, {len(data.test_labels)} to test; {dear.size()} worker(s)", flush=True)
    silent = not talks or os.environ.get("TQDM_DISABLE", "0") != "0"
    with tqdm(total=args.epochs * steps, initial=len(history) * steps, disable=silent, ncols=80, unit="step") as bar:
        for epoch in range(len(history), args.epochs):
            seed = args.seed * 1_000_003 + epoch
            torch.manual_seed(seed * 65_537 + dear.rank())  # dropout
            started = time.perf_counter()
            train_loss, train_accuracy = train_epoch(
                model, optimizer, data, local_batches(samples, per_rank, seed), bar
            )
            rate = steps * per_rank * dear.size() / (time.perf_counter() - started)
            scheduler.step()
            test_loss, test_accuracy = evaluate(model, data)
            history.append(
                {
                    "train_loss": train_loss,
                    "train_accuracy": train_accuracy,
                    "test_loss": test_loss,
                    "test_accuracy": test_accuracy,
                }
            )
            if not talks:
                continue
            bar.write(
                f"epoch {epoch + 1:>3}/{args.epochs}: loss {train_loss:.4f}, accuracy {train_accuracy:.2%}; "
                f"test loss {test_loss:.4f}, test accuracy {test_accuracy:.2%}; {rate:,.0f} samples/s"
            )
            if args.checkpoint is not None:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "history": history,
                    "settings": settings,
                    "workers": dear.size(),
                }
                checkpoint_file.save(args.checkpoint, state)

    if talks:
        if args.plot is not None:
            plot(args.plot, history)
        print(f"test accuracy: {history[-1]['test_accuracy']:.2%}", flush=True)
    dear.shutdown()


if __name__ == "__main__":
    main()
