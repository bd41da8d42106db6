"""A process of a job of Trainer's: trains scenarios by the library's own Trainer, under DDP, and by DearTrainer.

python -m tests.integrations.trainer_job FOLDER SCENARIO...

Ranks compare the two; rank 0 leaves what the own one came to as FOLDER/SCENARIO.pt. One process compares its own with that.
"fsdp SCENARIO" is the same with a sharded model.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import dear
from dear.integrations.transformers import DearTrainer, DearTrainerMixin
from tests.integrations.sentences import WORDS, IteratedSentences, collate, gpt2, llama, sentences, t5
from tests.integrations.trainer_mistakes import mistakes

dear.init()

BATCH = 8  # of all processes together, in one pass
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_sum", "train_loss", "num_input_tokens_seen", "epoch")

Trained = dict[str, Any]


class Watching(TrainerCallback):
    """Nothing waits for parameters between step() and the next forward."""

    def __init__(self) -> None:
        self.on_their_way: list[int] = []

    def on_step_end(self, *_args: Any, optimizer: Any = None, **_rest: Any) -> None:
        engine = getattr(optimizer.optimizer, "_engine", None)
        if engine is not None:
            self.on_their_way.append(len(engine.transit.pending))


class SquaredLoss(Trainer):
    """Somebody's own Trainer, whose loss is a mean that Trainer has to scale."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_rest: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = outputs.logits.square().mean()
        return (loss, {"loss": loss, "logits": outputs.logits}) if return_outputs else loss


class DearSquaredLoss(DearTrainerMixin, SquaredLoss):
    pass


class Generating(Seq2SeqTrainer):
    """What one rank generates is longer than what another one does."""

    def prediction_step(self, *args: Any, **rest: Any) -> Any:
        return super().prediction_step(*args, **rest, max_new_tokens=2 + 3 * dear.rank())


class DearGenerating(DearTrainerMixin, Generating):
    pass


class Scored(torch.nn.Module):
    """A model that is none of the library's: its state is written as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(WORDS, 16)
        self.mixed = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.LayerNorm(16))
        self.scores = torch.nn.Linear(16, WORDS)
        self.double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.scores(self.mixed(self.words(input_ids)))
        return {"loss": torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}


def lora(model: torch.nn.Module) -> Any:
    """Adapters in place of the attention's weights; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


#: What a scenario has instead of the defaults: arguments of TrainingArguments, and under other names what is said there.
SCENARIOS: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all"},
    "best": {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
    "lengths": {
        "data": lambda: sentences(48, even=False),
        "collator": collate,
        "train_sampling_strategy": "group_by_length",
        "label_smoothing_factor": 0.1,
        "gradient_accumulation_steps": 3,
        "include_num_input_tokens_seen": "non_padding",
        "max_grad_norm": 0.0,
    },
    "tokens of each rank": {
        "data": lambda: sentences(48, even=False),
        "collator": collate,
        "average_tokens_across_devices": False,
        "gradient_accumulation_steps": 2,
    },
    "iterated": {"data": lambda: IteratedSentences(64), "max_steps": 6, "gradient_accumulation_steps": 2},
    "checkpointed": {"gradient_checkpointing": True, "lr_scheduler_type": "cosine"},
    "bf16": {"bf16": True, "model": lambda: gpt2().float()},
    "lora": {"model": lambda: lora(gpt2()), "save_strategy": "epoch"},
    "resumed": {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 3, "gradient_accumulation_steps": 2},
    "module": {"model": Scored, "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
    "own trainer": {"kinds": (SquaredLoss, DearSquaredLoss), "gradient_accumulation_steps": 2},
    "adafactor": {"optim": "adafactor", "options": {"strategy": "oss", "per_parameter": True}},
    "wfbp": {"options": {"strategy": "wfbp"}},
    "mgwfbp": {"options": {"strategy": "mgwfbp"}},
    "bytescheduler": {"options": {"strategy": "bytescheduler_adapter"}},
    "llama": {"model": llama, "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
    "generated": {
        "model": t5,
        "kinds": (Generating, DearGenerating),
        "arguments": Seq2SeqTrainingArguments,
        "predict_with_generate": True,
        "metrics": lambda predicted: {"sum": float(predicted.predictions.sum())},
        "eval_strategy": "epoch",
    },
    "layer by layer": {"options": {"threshold_mb": 0}, "optim": "sgd", "optim_args": "momentum=0.9"},
}


def scenario(name: str) -> dict[str, Any]:
    """A copy of it; by fsdp, parameters are in several buckets."""
    chosen = dict(SCENARIOS[name.removeprefix("fsdp ")])
    if name.startswith("fsdp "):
        promise = {key: value for key, value in chosen.get("options", {}).items() if key == "per_parameter"}
        chosen["options"] = {"strategy": "fsdp", "threshold_mb": 0.01, **promise}
    return chosen


def train(name: str, kind: type[Trainer], folder: Path, **extra: Any) -> Trained:
    """The logs, the parameters and the evaluation that a scenario comes to; on every rank the same."""
    chosen = scenario(name)
    chosen.pop("kinds", None)
    arguments = chosen.pop("arguments", TrainingArguments)
    build, data, collator = (
        chosen.pop("model", gpt2),
        chosen.pop("data", lambda: sentences(48)),
        chosen.pop("collator", None),
    )
    options, metrics = chosen.pop("options", None), chosen.pop("metrics", None)
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": BATCH // dear.size(),
        "per_device_eval_batch_size": BATCH // dear.size(),
        "num_train_epochs": 2,
        "learning_rate": 0.02,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "ddp_find_unused_parameters": False,
    }
    watching = Watching()
    ours = issubclass(kind, DearTrainerMixin)
    given: dict[str, Any] = {"dear_options": options} if ours else {}
    trainer = kind(
        model=build(),
        args=arguments(**{**defaults, **chosen}),
        train_dataset=data(),
        eval_dataset=sentences(20),
        data_collator=collator,
        compute_metrics=metrics,
        callbacks=[watching, *extra.pop("callbacks", ())],
        **given,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(**extra)
    if ours and dear.size() > 1:
        assert type(trainer.model_wrapped) is type(trainer.model)
        strategy = (options or {}).get("strategy", "dear")
        assert strategy not in ("dear", "oss") or min(watching.on_their_way) > 0, watching.on_their_way
        freed = [bucket.freed for bucket in trainer.optimizer.optimizer.buckets]
        assert freed == [strategy == "fsdp"] * len(freed)
    evaluated = trainer.evaluate()["eval_loss"]
    logs = [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history]
    values = {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}
    return {"logs": logs, "values": values, "eval_loss": evaluated, "best": trainer.state.best_metric}


def compare(mine: Trained, theirs: Trained, tolerance: float) -> None:
    """Losses are logged in fp32 and norms in the parameters' type; parameters are compared as they are."""
    assert len(mine["logs"]) == len(theirs["logs"])
    for step, (ours, other) in enumerate(zip(mine["logs"], theirs["logs"], strict=True)):
        assert ours.keys() == other.keys()
        for key, value in ours.items():
            near = max(tolerance, 1e-6 if "loss" in key else 0) * max(abs(value), 1e-9)
            assert abs(value - other[key]) <= near, (step, key, value, other[key])
    assert abs(mine["eval_loss"] - theirs["eval_loss"]) <= max(tolerance, 1e-6) * abs(mine["eval_loss"])
    assert mine["values"].keys() == theirs["values"].keys()
    for key, value in mine["values"].items():
        torch.testing.assert_close(
            value, theirs["values"][key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


def tolerance(name: str) -> float:
    return {"bf16": 1e-3, "adafactor": 1e-6}.get(name.removeprefix("fsdp "), 1e-9)  # Adafactor computes in fp32


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    warnings.simplefilter("ignore")
    for name in names:
        if name == "mistakes":
            mistakes(folder)
            continue
        own, ours = scenario(name).get("kinds", (Trainer, DearTrainer))
        expected = train(name, own, folder / f"own-{name}-{dear.size()}")
        left = folder / f"{name}.pt"
        if dear.size() == 1:
            compare(expected, torch.load(left), tolerance(name))
        else:
            compare(train(name, ours, folder / f"dear-{name}"), expected, tolerance(name))
        if dear.rank() == 0:
            torch.save(expected, left)
            print(f"({name}) the same", flush=True)


if __name__ == "__main__":
    main()
