"""Hugging Face's Trainer over dear: train, evaluate, save, resume, load the best. The model and the data are made here.

dearrun -np 2 python examples/trainer.py --output-dir out
torchrun --nproc-per-node 2 examples/trainer.py --output-dir out --resume --epochs 6
torchrun --nproc-per-node 2 examples/trainer.py --lora
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

import dear
from dear.integrations.transformers import DearTrainer

WORDS, LENGTH = 64, 8


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Of two kinds: they take most words from one half of the dictionary or from the other."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    words = torch.randint(WORDS // 2, (count, LENGTH), generator=generator)
    other = torch.rand(count, LENGTH, generator=generator) < 0.1
    words = words + (labels.unsqueeze(1) ^ other.long()) * (WORDS // 2)
    return [{"input_ids": line, "labels": label} for line, label in zip(words, labels, strict=True)]


def build(width: int, *, lora: bool) -> torch.nn.Module:
    """A BERT of two layers, the same on every rank; with `lora`, adapters of PEFT and the classifier are trained alone."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
    config = BertConfig(vocab_size=WORDS, hidden_size=width, intermediate_size=2 * width, num_labels=2, **shape)
    model: torch.nn.Module = BertForSequenceClassification(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]))
    return model


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


class StopAfter(TrainerCallback):
    """Ends after so many epochs of the schedule, to be resumed later."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def on_epoch_end(self, _args: Any, state: Any, control: Any, **_rest: Any) -> None:
        control.should_training_stop |= round(state.epoch) >= self._epochs


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hugging Face's Trainer over dear")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output-dir", help="keep checkpoints here")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output-dir")
    parser.add_argument("--stop-after", type=int, help="end after this many epochs of the schedule, to resume later")
    parser.add_argument("--lora", action="store_true", help="train adapters of PEFT alone")
    parser.add_argument("--small", action="store_true", help="a few seconds")
    found = parser.parse_args(argv)
    if found.resume and found.output_dir is None:
        parser.error("--resume needs an --output-dir to resume from")
    return found


def main(argv: list[str] | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    options = arguments(argv)
    dear.init()  # before TrainingArguments, which look for the other processes
    keeps = options.output_dir is not None
    with tempfile.TemporaryDirectory() as unused:
        args = TrainingArguments(
            output_dir=options.output_dir or unused,
            use_cpu=not torch.cuda.is_available(),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=8 if options.small else 16,
            gradient_accumulation_steps=2,
            learning_rate=3e-2 if options.lora else 3e-3,
            warmup_steps=5,
            weight_decay=0.01,
            bf16=True,
            eval_strategy="epoch",
            save_strategy="epoch" if keeps else "no",
            metric_for_best_model="accuracy",
            load_best_model_at_end=keeps and options.stop_after is None,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = DearTrainer(
            model=build(16 if options.small else 64, lora=options.lora),
            args=args,
            train_dataset=sentences(304 if options.small else 4096, seed=1),
            eval_dataset=sentences(200, seed=2),
            compute_metrics=accuracy,
            callbacks=[] if options.stop_after is None else [StopAfter(options.stop_after)],
        )
        trainer.train(resume_from_checkpoint=options.resume)
        found = trainer.evaluate()["eval_accuracy"]
    return found, trainer.model.state_dict()


if __name__ == "__main__":
    main()
