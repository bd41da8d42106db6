"""A Trainer class in the manner of Hugging Face's, over dear: train, evaluate, save, resume.

scripts/mpirun -np 2 .venv/bin/python examples/trainer.py --output-dir out
scripts/mpirun -np 2 .venv/bin/python examples/trainer.py --output-dir out --resume --epochs 6
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint_file
import torch
from torch import nn
from torch.nn import functional

import dear


@dataclass
class TrainingArguments:
    """Batches are those of one worker; a step takes `gradient_accumulation_steps` of them on each."""

    output_dir: Path | None = None
    num_train_epochs: int = 4
    per_device_train_batch_size: int = 16
    gradient_accumulation_steps: int = 2
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 5
    max_grad_norm: float = 1.0
    bf16: bool = True
    seed: int = 42


class Trainer:
    """Trains `model`, whose forward takes tokens of shape (n, length) and returns logits, on (tokens, labels)."""

    def __init__(
        self, model: nn.Module, args: TrainingArguments, train_data: torch.Tensor, labels: torch.Tensor
    ) -> None:
        self.model, self.args, self.data, self.labels = model, args, train_data, labels
        inner = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=args.weight_decay)
        self.optimizer: Any = dear.DistributedOptimizer(inner, model)
        per_batch = args.per_device_train_batch_size * dear.size()
        self.batches = len(train_data) // per_batch
        self.steps_per_epoch = -(-self.batches // args.gradient_accumulation_steps)  # the last one may hold fewer
        self.total = args.num_train_epochs * self.steps_per_epoch
        self.epoch = 0
        self.scheduler = self._schedule()

    def _schedule(self) -> torch.optim.lr_scheduler.LambdaLR:
        """At the place of the epochs that are done, in this job's steps: another number of workers makes other ones."""
        warmup, total = self.args.warmup_steps, self.total
        return torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min((step + 1) / warmup, max(0.0, (total - step) / total)),
            last_epoch=self.epoch * self.steps_per_epoch - 1,
        )

    def train(self, resume: bool = False) -> float:
        """Returns the mean loss of the last epoch, over all workers."""
        if resume:
            self.load()
        loss = float("nan")
        while self.epoch < self.args.num_train_epochs:
            loss = self._train_epoch()
            self.epoch += 1
            self.save()
        return loss

    def _train_epoch(self) -> float:
        args, size = self.args, self.args.per_device_train_batch_size
        self.model.train()
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(args.seed + self.epoch))
        total = torch.zeros(())
        for first in range(0, self.batches, args.gradient_accumulation_steps):
            window = range(first, min(first + args.gradient_accumulation_steps, self.batches))
            self.optimizer.zero_grad()
            for number in window:
                start = (number * dear.size() + dear.rank()) * size
                last = number == window[-1]
                with contextlib.nullcontext() if last else self.optimizer.no_sync():
                    loss = self._loss(order[start : start + size])
                    (loss / len(window)).backward()
                total += loss.detach()
            self.optimizer.clip_grad_norm_(args.max_grad_norm)
            self.optimizer.step()
            self.scheduler.step()
        mean = float(dear.allreduce(total / self.batches))
        if dear.rank() == 0:
            rate = self.scheduler.get_last_lr()[0]
            print(f"epoch {self.epoch + 1}: loss {mean:.4f}, learning rate {rate:.2e}", flush=True)
        return mean

    def _loss(self, chosen: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.args.bf16):
            logits = self.model(self.data[chosen])
        return functional.cross_entropy(logits.float(), self.labels[chosen])

    @torch.no_grad()
    def evaluate(self, data: torch.Tensor, labels: torch.Tensor) -> float:
        """Accuracy over all workers, each of which looks at its part."""
        self.model.eval()
        mine = slice(dear.rank(), None, dear.size())
        right = (self.model(data[mine]).argmax(1) == labels[mine]).sum()
        return float(dear.allreduce(right.float(), op=dear.Sum)) / len(data)

    @property
    def _path(self) -> Path | None:
        return None if self.args.output_dir is None else self.args.output_dir / "checkpoint.pt"

    def save(self) -> None:
        """Rank 0 alone writes; the others go on."""
        if self._path is None or dear.rank() != 0:
            return
        state = {"epoch": self.epoch} | {name: part.state_dict() for name, part in self._parts().items()}
        checkpoint_file.save(self._path, state)

    def load(self) -> None:
        """Rank 0 alone reads, and everybody gets what it read."""
        if self._path is None:
            raise ValueError("there is nothing to resume from without an output_dir")
        state = dear.broadcast_object(torch.load(self._path, weights_only=True) if dear.rank() == 0 else None)
        assert state is not None
        self.epoch = state["epoch"]
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.scheduler = self._schedule()

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


class Classifier(nn.Module):
    """A transformer's encoder and the mean of what it says about each token."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def sentences(count: int, seed: int, words: int = 64, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two kinds: they take most words from one half of the dictionary or from the other."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    tokens = torch.randint(words // 2, (count, length), generator=generator)
    other = torch.rand(count, length, generator=generator) < 0.1
    return tokens + (labels.unsqueeze(1) ^ other.long()) * (words // 2), labels


def main(argv: list[str] | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    parser = argparse.ArgumentParser(description="A Hugging Face-style Trainer over dear")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument("--resume", action="store_true", help="continue from --output-dir")
    parser.add_argument("--stop-after", type=int, help="end after this many epochs of the schedule, to resume later")
    parser.add_argument("--small", action="store_true", help="a few seconds")
    options = parser.parse_args(argv)
    dear.init()
    torch.manual_seed(dear.rank())  # the wrapper brings rank 0's values
    args = TrainingArguments(options.output_dir, num_train_epochs=options.epochs)
    if options.small:
        args.per_device_train_batch_size, args.learning_rate = 8, 1e-2
    model = Classifier(words=64, width=16 if options.small else 64, classes=2)
    trainer = Trainer(model, args, *sentences(296 if options.small else 4096, seed=1))
    if options.stop_after is not None:
        args.num_train_epochs = options.stop_after
    trainer.train(resume=options.resume)
    accuracy = trainer.evaluate(*sentences(200, seed=2))
    if dear.rank() == 0:
        print(f"accuracy {accuracy:.2%}", flush=True)
    return accuracy, model.state_dict()


if __name__ == "__main__":
    main()
