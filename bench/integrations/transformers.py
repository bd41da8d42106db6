"""One rank of a Trainer's run: plain Trainer, whose accelerator puts DDP around the model, or DearTrainer."""

from __future__ import annotations

import tempfile
from typing import Any

from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from bench.integrations.task import LEARNING_RATE, Task, data, model

__all__ = ["main"]


class _Clock(TrainerCallback):
    def __init__(self, task: Task) -> None:
        self._task = task

    def on_train_begin(self, *_args: Any, **_rest: Any) -> None:
        self._task.begin()

    def on_step_end(self, *_args: Any, **_rest: Any) -> None:
        self._task.step_ended()


def main() -> None:
    task = Task()
    kind: type[Trainer] = Trainer
    if task.method == "dear":
        import dear
        from dear.integrations.transformers import DearTrainer

        dear.init()
        kind = DearTrainer
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=task.batch,
            max_steps=task.steps,
            learning_rate=LEARNING_RATE,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            ddp_find_unused_parameters=False,
            ddp_bucket_cap_mb=task.ddp.get("bucket_cap_mb"),
            ddp_static_graph=task.ddp.get("static_graph"),
        )
        examples = data(task.steps, task.workers)
        trainer = kind(model=model(), args=args, train_dataset=examples, callbacks=[_Clock(task)])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if trainer.is_world_process_zero():
            task.leave([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    main()
