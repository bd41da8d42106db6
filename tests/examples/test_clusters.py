"""Batch scripts and manifests of examples/: well formed, and what they start is something that our launchers take."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from dearrun import options
from tests.harness import ROOT

SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sh"))
MANIFESTS = ROOT / "examples" / "kubernetes"

ALLOCATION = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_CPUS_PER_TASK": "4",
}
#: What each of them starts in that allocation: the options of srun, and the command that follows.
STARTED = {
    "dearrun.sh": ("", "dearrun -np 4 -H node1:2,node2:2 -x OMP_NUM_THREADS python train.py"),
    "torchrun.sh": (
        "srun --cpus-per-task=4",
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint node1:29500 train.py",
    ),
    "srun_mpi.sh": ("srun --mpi=pmix --cpus-per-task=4", "python train.py"),
}
_TOLD = '#!/bin/sh\necho "$(basename "$0") $*"\n'


def _taken(command: list[str]) -> list[str]:
    """The worker's command, after dearrun or torchrun has read its own options."""
    program, *arguments = command
    if program == "dearrun":
        return list(options.job(options.parser().parse_args(arguments), {"OMP_NUM_THREADS": "1"}).command)
    if program == "torchrun":
        args = get_args_parser().parse_args(arguments)
        return ["python", args.training_script, *args.training_script_args]
    return command


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_batch_script_starts_what_it_should(script: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("srun", "dearrun"):
        (tools / name).write_text(_TOLD)
    (tools / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    environ = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), **ALLOCATION}
    done = subprocess.run(["bash", str(script)], env=environ, capture_output=True, text=True, timeout=30, check=True)
    before, command = STARTED[script.name]
    assert done.stdout.strip() == f"{before} {command}".strip()
    assert _taken(shlex.split(command)) == ["python", "train.py"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_batch_script_is_clean(script: Path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = script.read_text().splitlines()
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    settings = [number for number, line in enumerate(lines) if line.startswith("#SBATCH --")]
    assert len(settings) == 5
    assert max(settings) < min(commands), "sbatch reads nothing after the first command"


def _documents(name: str) -> dict[str, dict[str, Any]]:
    found = list(yaml.safe_load_all((MANIFESTS / name).read_text()))
    return {f"{document['apiVersion']} {document['kind']}": document for document in found}


def _container(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    assert {"name", "image", "command", "resources"} <= set(found)
    assert all(isinstance(word, str) for word in found["command"])
    return dict(found)


def test_the_indexed_job_runs_torchrun_in_every_pod() -> None:
    documents = _documents("torchrun.yaml")
    assert set(documents) == {"v1 Service", "batch/v1 Job"}
    service, job = documents["v1 Service"], documents["batch/v1 Job"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    shell, flag, line = _container(spec["template"])["command"]
    assert (shell, flag) == ("sh", "-c")
    words = shlex.split(line.replace("$JOB_COMPLETION_INDEX", "1"))
    args = get_args_parser().parse_args(words[2:])
    assert (words[:2], args.training_script) == (["exec", "torchrun"], "train.py")
    assert int(args.nnodes) == spec["completions"] == spec["parallelism"]
    assert (spec["completionMode"], args.node_rank, pod["restartPolicy"]) == ("Indexed", 1, "Never")
    # Pod 0 is job-0.service; the service finds the job's pods.
    name = job["metadata"]["name"]
    assert args.master_addr == f"{name}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert args.master_port == service["spec"]["ports"][0]["port"]


def test_the_mpijob_runs_dearrun_on_its_workers(tmp_path: Path) -> None:
    ((kind, job),) = _documents("mpijob.yaml").items()
    assert kind == "kubeflow.org/v2beta1 MPIJob"
    spec, replicas = job["spec"], job["spec"]["mpiReplicaSpecs"]
    launcher, worker = _container(replicas["Launcher"]["template"]), _container(replicas["Worker"]["template"])
    assert launcher["image"] == worker["image"]
    program, *arguments = launcher["command"]
    args = options.parser().parse_args(arguments)
    assert (program, args.hostfile) == ("dearrun", "/etc/mpi/hostfile")
    written = tmp_path / "hostfile"  # as the operator writes it
    hosts = [f"dear-worker-{number}.dear.default.svc" for number in range(replicas["Worker"]["replicas"])]
    written.write_text("".join(f"{host} slots={spec['slotsPerWorker']}\n" for host in hosts))
    args.hostfile = str(written)
    found = options.job(args, {})
    assert found.workers == replicas["Worker"]["replicas"] * spec["slotsPerWorker"]
    assert [host.name for host in found.hosts] == hosts
    assert found.command == ("python", "train.py")
    assert worker["readinessProbe"]["tcpSocket"]["port"] == 22, "the launcher is made when workers are ready"
