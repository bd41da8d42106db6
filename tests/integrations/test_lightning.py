"""Lightning's Trainer and Fabric over dear, with the real library: see docs/lightning.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Result, run_ranks, run_script
from tests.integrations.jobs import in_ranks

pytestmark = pytest.mark.timeout(900)

TRAINER = ("lightning_trainer.py", "lightning_checkpoints.py")
#: What a job inside an allocation of SLURM finds there, whoever has started its ranks: not their own numbers.
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NAME": "train",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
}
SCRIPT = """
import sys
import dear
{imports}
import dear.integrations.lightning
{body}
"""
MODEL = """
class Module({package}.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

torch.manual_seed(0)
module, data = Module(), torch.utils.data.DataLoader(torch.ones(8, 2), 2)
trainer = {package}.Trainer(strategy="dear", accelerator="cpu", devices=int(sys.argv[1]), max_epochs=1, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, data)
print(f"rank {{dear.rank()}} of {{dear.size()}}: {{len(trainer.train_dataloader)}} batches", flush=True)
"""


def test_losses_and_checkpoints_are_those_of_ddp() -> None:
    in_ranks([*TRAINER], "mpi", chosen="test_losses_are or test_checkpoints_are")


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_trainer(launcher: str) -> None:
    in_ranks([*TRAINER], launcher)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_fabric_and_examples(launcher: str) -> None:
    in_ranks(["lightning_fabric.py", "lightning_examples.py"], launcher, env=SLURM if launcher == "mpi" else {})


@pytest.mark.full
def test_four_ranks() -> None:
    in_ranks([*TRAINER], "mpi", 4, chosen="resumed or holds or one_process or every")


def _script(folder: Path, body: str, launcher: str, size: int, *argv: str, package: str = "lightning") -> Result:
    text = SCRIPT.format(imports=f"import torch, {package}", body=body + MODEL.format(package=package))
    return run_script(folder, text, size, launcher, *argv)


@pytest.mark.full
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_without_a_launcher_lightning_starts_the_others(package: str, tmp_path: Path) -> None:
    result = _script(tmp_path, "", "single", 1, "2", package=package).check()
    assert sorted(line for line in result.output.splitlines() if line.startswith("rank ")) == [
        "rank 0 of 2: 2 batches",
        "rank 1 of 2: 2 batches",
    ]


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "size"), [("mpi", 2), ("torchrun", 2), ("single", 1)])
def test_other_processes_than_the_job_has_are_refused_in_one_line(launcher: str, size: int, tmp_path: Path) -> None:
    result = _script(tmp_path, "dear.init()" if launcher == "single" else "", launcher, size, "3")
    assert result.returncode != 0
    said = [
        line for line in result.output.splitlines() if line.startswith("devices=3 and num_nodes=1 mean 3 process(es)")
    ]
    assert said, result.output
    assert said[0].endswith(
        "or leave out dear.init(), so that Lightning can start the others"
        if launcher == "single"
        else "give devices=2, num_nodes=1"
    )
    assert "site-packages/lightning" not in result.output, "no traceback"


def test_dear_itself_needs_no_lightning(tmp_path: Path) -> None:
    code = "import sys, dear; assert not {'lightning', 'pytorch_lightning', 'torchmetrics'} & {*sys.modules}"
    run_ranks(1, ["-c", code], "single", cwd=tmp_path).check()
