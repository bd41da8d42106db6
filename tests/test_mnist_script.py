"""mnist.sh: its variables are honoured, or it says what stands for them."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.harness import ROOT


def _run(**variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "nworkers": "1", "hostfile": "none", "PY": "echo -E would run", **variables}
    return subprocess.run(
        ["bash", "mnist.sh", "--epochs", "1"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )


def test_the_python_may_hold_arguments_and_the_first_line_names_the_data() -> None:
    result = _run()
    assert result.returncode == 0, result.stderr
    first, *rest = result.stdout.splitlines()
    assert first.startswith("mnist.sh: the digits that come with scikit-learn, 1 worker(s) over mpirun")
    assert any(f"would run {ROOT}/examples/mnist.py --epochs 1" in line for line in rest)


def test_gpuids_are_the_gpus_that_workers_see() -> None:
    result = _run(PY="printenv CUDA_VISIBLE_DEVICES XDEBUG", gpuids="0,2")
    assert "0,2" in result.stdout


@pytest.mark.parametrize(
    ("rdma", "said"),
    [("1", "rdma=1 is ignored: InfiniBand verbs are not supported"), ("2", "name the interface in IB_INTERFACE")],
)
def test_what_is_not_honoured_is_said(rdma: str, said: str) -> None:
    result = _run(rdma=rdma)
    assert said in result.stderr
    assert (result.returncode == 0) is (rdma == "1")
