"""What a run is made of: settings, methods, launchers; and one run from its script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.methods.fsdp import layers, units
from bench.methods.method import tensor_bytes
from bench.methods.registry import METHODS, method
from bench.methods.spec import family_of, parse_spec
from bench.train import launcher
from bench.train.launcher import LauncherError, first_host, local_command, narrowed, needed_bytes, pick
from bench.train.settings import Settings, parse
from bench.train.stepping import Clock, alone, breakdown, step, warm_up
from overlap.plan.simulation.profile import from_text
from tests.bench.test_dears_flags import asked_of_python
from tests.harness import ROOT, run_ranks


def test_settings_take_the_models_own_sizes() -> None:
    settings, outputs = parse(["--model", "bert", "--json", "x.json"])
    assert (settings.batch_size, settings.size, outputs.json) == (32, 64, Path("x.json").absolute())
    small, _ = parse(["--model", "resnet50", "--small"])
    assert (small.batch_size, small.size) == (8, 64)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workers", "0"], "workers should be at least 1 and is 0"),
        (["--num-warmup-batches", "1"], "at least 2"),
        (["--dilate", "2"], "--emulate-compute"),
        (["--network", "1gbit", "--hostfile", "hosts"], "hosts names a real network and --network 1gbit emulates one"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(argv)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--network", "1gbit"], "--network 1gbit is for who starts the workers; mpirun or torchrun has started these"),
        (["--timeout", "9"], "--timeout 9.0 is for who starts the workers"),
        (["--workers", "4"], "--workers 4: mpirun or torchrun has started 2"),
    ],
)
def test_a_rank_of_somebodys_job_refuses_what_comes_too_late(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse([], 2)[0] == parse(["--workers", "2"])[0] == parse(["--workers", "2"], 2)[0]
    with pytest.raises(SystemExit):
        parse(argv, 2)
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_a_rank_of_somebodys_job_sets_what_its_method_reads(tmp_path: Path) -> None:
    timeline, result = tmp_path / "t-{rank}.json", tmp_path / "result.json"
    counts = ["--num-iters", "1", "--num-batches-per-iter", "2", "--num-warmup-batches", "2", "--breakdown"]
    argv = [
        "-m",
        "bench.train",
        "--method",
        "dear:threshold_mb=1",
        "--model",
        "narrow_mlp",
        "--emulate-compute",
        "narrow_mlp@even:5",
        *counts,
    ]
    argv += ["--timeline", str(timeline), "--json", str(result)]
    run_ranks(2, argv, cwd=ROOT).check()
    assert json.loads(result.read_text())["settings"]["workers"] == 2
    for rank in range(2):
        events = json.loads((tmp_path / f"t-{rank}.json").read_text())
        names = [event["name"] for event in (events["traceEvents"] if isinstance(events, dict) else events)]
        steps = [name for name in names if name.startswith("step")]
        assert len(steps) == 4, names  # those of --breakdown, which go without the method, are none of them
    assert "horovod" in METHODS
    assert launcher.for_method(method("horovod:cycle_ms=20"), None) == {"HOROVOD_CYCLE_TIME": "20"}


def test_horovods_own_search_is_waited_for() -> None:
    searching, other = method("horovod:autotune=True,yield_when_idle=True"), method("horovod")
    assert searching.environment["HOROVOD_AUTOTUNE"] == "1"
    assert "HOROVOD_AUTOTUNE" not in other.environment
    optimizer = torch.optim.SGD([torch.zeros(1)])
    assert warm_up(3, lambda: searching.tuning(optimizer), lambda: None) == 120
    assert warm_up(3, lambda: other.tuning(optimizer), lambda: None) == 3
    assert family_of("horovod:autotune=True") == "horovod"


def test_a_method_is_written_with_its_options() -> None:
    assert parse_spec("ddp:bucket_mb=4,view=True") == ("ddp", {"bucket_mb": 4, "view": True})
    assert parse_spec("dear:exclude_parts=reducescatter allgather")[1] == {"exclude_parts": "reducescatter allgather"}
    with pytest.raises(ValueError, match="holds 'fast'"):
        parse_spec("dear:fast")
    told = {"static_graph": False, "compression": None, "powersgd": None, "backend": None}
    assert method("ddp:bucket_mb=4").options == {"bucket_mb": 4, "view": False, **told}


def test_unknown_methods_and_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"one of dear, .* and is 'deer'"):
        method("deer")
    with pytest.raises(ValueError, match="ddp does not know bucket; it knows bucket_mb, view, static_graph"):
        method("ddp:bucket=4")
    with pytest.raises(ValueError, match=r"dear does not know treshold_mb; it knows .*; is threshold_mb meant\?"):
        method("dear:treshold_mb=3")
    assert method("co2:outer_frequency=3,sync_start=False").options == {"outer_frequency": 3, "sync_start": False}
    assert {"dear", "wfbp", "oss", "none", "ddp", "ddp-zero", "fsdp2", "horovod"} <= set(METHODS)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fsdp2:reshard=7", "reshard of fsdp2 should be True or False and is 7"),
        ("ddp:view=maybe", "view of ddp should be True or False and is 'maybe'"),
        ("ddp:bucket_mb=big", "bucket_mb of ddp should be a number of at least 0 and is 'big'"),
        ("ddp:view=0.5", "view of ddp should be True or False and is 0.5"),
        ("ddp:backend=glue", "backend of ddp should be one of gloo, nccl, dear, or None, and is 'glue'"),
        ("fsdp2:replicas=0", "replicas of fsdp2 should be a whole number of at least 1 and is 0"),
        ("fsdp2:beside=True,prefetch=2", "beside of fsdp2 gathers one module ahead: leave prefetch out"),
        ("fsdp2:unit_layers=0", "unit_layers of fsdp2 should be a whole number of at least 1, or None, and is 0"),
        ("fsdp2:unit_layers=2.5", "unit_layers of fsdp2 should be a whole number of at least 1, or None, and is 2.5"),
        ("horovod:yield_when_idle=2", "yield_when_idle of horovod should be True or False and is 2"),
        ("horovod:autotune=True,cycle_ms=5", "autotune of horovod searches cycle_ms: leave one of them out"),
        ("horovod:cycle_ms=-1", "cycle_ms of horovod should be a number of at least 0 and is -1"),
    ],
)
def test_options_with_values_that_mean_nothing_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method(spec)


def test_horovods_settings_travel_through_its_environment() -> None:
    tuned = method("horovod:fusion_mb=4,cycle_ms=2.5")
    assert tuned.environment == {"HOROVOD_FUSION_THRESHOLD": str(4 * 2**20), "HOROVOD_CYCLE_TIME": "2.5"}
    assert method("horovod").environment == {}
    assert method("horovod:yield_when_idle=True").environment == {"OMPI_MCA_mpi_yield_when_idle": "1"}


def test_links_are_narrowed_as_compute_is_stretched() -> None:
    assert narrowed("10gbit", 50) == "200000000bit"
    assert narrowed("100mbit", 1) == "100000000bit"
    with pytest.raises(ValueError, match="not 'fast'"):
        narrowed("fast", 1)


def test_every_method_is_started_by_what_it_prefers() -> None:
    assert pick(Settings(workers=2), method("dear")) == "mpi"
    assert pick(Settings(workers=2, launcher="torchrun"), method("dear")) == "torchrun"
    assert pick(Settings(workers=2), method("ddp")) == "torchrun"
    assert pick(Settings(workers=2, hostfile="hosts"), method("ddp")) == "mpi"
    with pytest.raises(LauncherError, match="horovod runs under mpi, not under torchrun"):
        pick(Settings(launcher="torchrun"), method("horovod"))


def test_a_hostfile_reaches_mpirun_with_the_environment(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\n\nnode1 slots=2\nnode2 slots=2\n")
    command = local_command("mpi", Settings(workers=4, hostfile=str(hosts)), ["-m", "bench.train"], ["A", "B"])
    assert command[1:9] == ["-np", "4", "--hostfile", str(hosts), "--map-by", "slot", "-x", "A"]
    assert command[-4:] == ["B", sys.executable, "-m", "bench.train"]
    assert first_host(hosts) == "node1"
    hosts.write_text("# nobody\n")
    with pytest.raises(LauncherError, match="names no host"):
        first_host(hosts)


def test_workers_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model="mlp", workers=2, optimizer="adamw")
    assert needed_bytes(settings) == 2 * (5 * 4 * 25_050_000 + 400 * 10**6)
    monkeypatch.setattr("bench.train.launcher.needed_bytes", lambda _settings: 10**15)
    with pytest.raises(LauncherError, match=r"2 workers with mlp need about 1000000.0 GB on this machine, which has"):
        launcher.launch(settings, method("dear"), [])


def test_fsdp_units_are_large_enough_and_leave_tied_parameters_to_the_root() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = nn.Sequential(block, nn.Linear(8, 64), nn.ModuleList([nn.Linear(8, 8)]))
    assert units(model, 1000) == [block, model[1], model[2][0]]
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    assert units(tied, 300) == [tied[2]]


def test_fsdp_units_may_be_so_many_layers() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = nn.Sequential(block, nn.Linear(8, 8))
    assert layers(model, 2) == [[block[0], block[2]], [model[1]]]
    assert layers(model, 1) == [[block[0]], [block[2]], [model[1]]]


@pytest.mark.parametrize(("spec", "sizes"), [("fsdp2:unit_layers=3", [3, 1]), ("fsdp2", [1, 1])])
def test_fsdp_shards_the_units_that_were_asked_for(
    spec: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    monkeypatch.setattr("bench.methods.fsdp.fully_shard", lambda unit, **_options: given.append(unit))
    monkeypatch.setattr("bench.methods.fsdp.UNIT_BYTES", 1000)
    monkeypatch.setattr("bench.methods.process_group.mesh", lambda *_arguments: None)
    monkeypatch.setattr("bench.methods.process_group.join", lambda *_arguments: None)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))
    fsdp = method(spec)
    fsdp.join(torch.device("cpu"))
    fsdp.distribute(model, (torch.optim.SGD, {"lr": 0.1}))
    assert given[-1] is model
    assert [len(unit) if isinstance(unit, list) else 1 for unit in given[:-1]] == sizes


@pytest.mark.parametrize(("count", "search", "steps"), [(5, 0, 5), (5, 3, 5), (5, 4, 5), (5, 5, 6), (2, 338, 339)])
def test_warming_up_ends_with_a_step_after_the_search(count: int, search: int, steps: int) -> None:
    taken: list[bool] = []
    assert warm_up(count, lambda: len(taken) < search, lambda: taken.append(True)) == len(taken) == steps


@pytest.mark.full
def test_a_method_is_timed_after_it_has_settled_on_its_buckets(tmp_path: Path) -> None:
    """mgwfbp plans anew after one step, one that warms up, and five that it times: the eighth has the final buckets."""
    output = tmp_path / "result.json"
    counts = ["--num-iters", "1", "--num-batches-per-iter", "1", "--num-warmup-batches", "2", "--json", str(output)]
    argv = ["-m", "bench.train", "--method", "mgwfbp"]
    argv += ["--model", "narrow_mlp", "--emulate-compute", "narrow_mlp@even:5"]
    done = run_ranks(2, [*argv, *counts], cwd=ROOT).check()
    assert "Warmed up for 8 steps instead of 2: mgwfbp was searching its buckets" in done.output
    assert json.loads(output.read_text())["warmup_steps"] == 8


@pytest.mark.full
def test_layers_are_measured_beside_a_run(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    argv = ["-m", "bench.train", "--method", "dear:threshold_mb=4", "--model", "narrow_mlp"]
    argv += ["--emulate-compute", "narrow_mlp@even:60", "--num-warmup-batches", "12", "--num-iters", "1"]
    argv += ["--num-batches-per-iter", "1", "--profile", str(profile)]
    run_ranks(2, argv, cwd=ROOT).check()
    found = from_text(profile.read_text())
    assert (len(found.layers), found.batch_size) == (400, 32)
    assert found.seconds > 0.06


def test_only_our_strategies_measure_layers() -> None:
    assert parse(["--profile", "x.json"])[1].profile == Path("x.json").absolute()
    with pytest.raises(ValueError, match="ddp does not measure layers: --profile is for our own strategies"):
        method("ddp").save_profile(torch.optim.SGD([torch.zeros(1)]), Path("x.json"), 8)


def test_only_methods_that_record_a_timeline_are_asked_for_one() -> None:
    settings = Settings(workers=2)
    assert launcher.environment(settings, method("dear"), "x.json")["DEAR_TIMELINE"] == "x.json"
    assert launcher.environment(settings, method("horovod"), "x.json")["HOROVOD_TIMELINE"] == "x.json"
    with pytest.raises(LauncherError, match="ddp records no timeline"):
        launcher.environment(settings, method("ddp"), "x.json")


def test_more_workers_than_cores_wait_without_spinning() -> None:
    cores = os.cpu_count() or 1
    few, many = (launcher.environment(Settings(workers=count), method("horovod")) for count in (cores, cores + 1))
    assert "OMPI_MCA_mpi_yield_when_idle" not in few
    assert many["OMPI_MCA_mpi_yield_when_idle"] == "1"
    real = Settings(workers=cores + 1, hostfile="hosts")
    assert "OMPI_MCA_mpi_yield_when_idle" not in launcher.environment(real, method("horovod"))


def test_no_run_pays_for_gradients_memory_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that went back to the kernel are faulted in again: a sixth of a step's time in some runs and none in others."""
    script = (
        "import resource, torch\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    made = [torch.ones(500, 500) for _ in range(100)]\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "print(faults(), sum(faults() for _ in range(3)))\n"
    )
    env = launcher.environment(Settings(workers=2), method("none"))
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, **env}, capture_output=True, text=True)
    first, later = map(int, done.stdout.split())
    assert later < first / 4, done.stdout  # without, it is twice the first
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    assert launcher.environment(Settings(workers=2), method("dear"))["MALLOC_TRIM_THRESHOLD_"] == "1000"


def test_time_alone_leaves_the_model_as_it_was_and_communication_is_the_rest() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    phases = alone(model, (torch.optim.SGD, {"lr": 0.1}), lambda m: m(torch.ones(2, 4)).sum(), torch.device("cpu"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert set(phases) == {"forward", "backward", "step"}
    made_of = breakdown({"forward": 0.1, "backward": 0.2, "step": 0.05}, 0.5)
    assert made_of.exposed == pytest.approx(0.15)
    assert str(made_of) == "forward 100.0 ms, backward 200.0 ms, update 50.0 ms, exposed communication 150.0 ms"


def test_state_is_counted_through_nesting() -> None:
    assert tensor_bytes({"a": [torch.zeros(3), (torch.zeros(2, dtype=torch.float64),)], "step": 7}) == 28


def test_the_script_of_a_strategy_trains_and_ends_with_the_throughput(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in (launcher.LAUNCHED, "MAKEFLAGS")}
    env |= {
        "dnn": "narrow_mlp",
        "bs": "4",
        "nworkers": "2",
        "hostfile": "none",
        "emulate_compute": "narrow_mlp@even:20",
    }
    counts = ["--num-iters", "2", "--num-batches-per-iter", "1", "--num-warmup-batches", "2", "--json", "result.json"]
    job = subprocess.run(
        [ROOT / "dear" / "horovod_mpi_cj.sh", *counts],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    last = job.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"Total img/sec on 2 CPU\(s\): [0-9.]+ \+-[0-9.]+", last)
    measured = json.loads((tmp_path / "result.json").read_text())
    assert measured["settings"]["emulate_compute"] == "narrow_mlp@even:20"
    assert len(measured["step_seconds"]) == 2
    assert min(measured["step_seconds"]) >= 0.02


@pytest.mark.parametrize(
    ("folder", "env", "told"),
    [
        ("dear", {"network": "1gbit", "hostfile": "h"}, "hostfile=h names real hosts, and network=1gbit emulates some"),
        ("dear", {"rdma": "2"}, "name the interface in IB_INTERFACE"),
        ("bench/baselines/pytorch-ddp", {"node_count": "2"}, "node_count=2: the number of workers is nworkers"),
    ],
)
def test_the_script_refuses_what_it_cannot_honour(folder: str, env: dict[str, str], told: str, tmp_path: Path) -> None:
    job, asked = asked_of_python(folder, env, tmp_path)
    assert (job.returncode, job.stdout, asked) == (2, "", [])
    assert told in job.stderr


@pytest.mark.parametrize(
    ("folder", "env", "asked"),
    [
        ("dear", {"dnn": "bert", "bs": "2", "nworkers": "4"},
         "dear --model bert --batch-size 2 --workers 4 --sentence-len 64 tcp="),
        ("dear", {"threshold": "4", "exclude_parts": "reducescatter,allgather"},
         "--threshold=4 --exclude-parts=reducescatter,allgather"),
        ("mgwfbp", {"asc": "1", "mgwfbp": "1", "compressor": "bf16"}, "--compressor=bf16 --asc=1 --mgwfbp=1"),
        ("bench/baselines/pytorch-ddp", {"use_zero": "1", "threshold": "8", "senlen": "9", "dnn": "gpt2"},
         "ddp --model gpt2 --batch-size 64 --workers 2 --sentence-len 9 --threshold=8 --use-zero=1"),
        ("bench/baselines/horovod", {"small": "1"}, "horovod --model resnet50 --batch-size 64 --workers 2 --small tcp="),
        ("oss", {"network": "1gbit", "emulate_compute": "mlp@even:9", "dilate": "3"},
         "--network 1gbit --emulate-compute mlp@even:9 --dilate 3"),
        ("oss", {"network": "10gbit", "dilate": "50"}, "--network 10gbit --dilate 50"),
        ("dear", {"dnn": "bert_base", "small": "1", "senlen": "128"}, "--small --sentence-len 128 tcp="),
        ("dear", {"dnn": "bert_base", "small": "1"}, "--small tcp="),
        ("dear", {"hostfile": "../configs/cluster1", "nworkers": "1"}, f"--hostfile {ROOT}/dear/../configs/cluster1"),
        ("co2", {"WFSGD_TIMELINE": "t.json"}, f"--timeline {ROOT}/co2/t.json"),
        ("dear", {"ETH_INTERFACE": "eth0", "IB_INTERFACE": "ib0"}, "tcp=eth0"),
        ("dear", {"ETH_INTERFACE": "eth0", "IB_INTERFACE": "ib0", "rdma": "2"}, "tcp=ib0"),
        ("dear", {"ETH_MPI_BTC_TCP_IF_INCLUDE": "10.0.0.0/24", "ETH_INTERFACE": "eth0"}, "tcp=10.0.0.0/24"),
    ],
)  # fmt: skip
def test_the_script_hands_its_variables_on(folder: str, env: dict[str, str], asked: str, tmp_path: Path) -> None:
    job, given = asked_of_python(folder, env, tmp_path)
    assert job.returncode == 0, job.stderr
    assert asked in " ".join([*given, *job.stdout.split()])


def test_on_a_gpu_the_clock_reads_events_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would see how long launches take: no time here."""
    passed = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.at = passed[0]

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        passed[0] += 7.0  # milliseconds of the device
        return model(torch.ones(1, 2)).sum()

    clock, model = Clock(torch.device("cuda", 0)), torch.nn.Linear(2, 1)
    step(model, torch.optim.SGD(model.parameters(), 0.1), loss_of, clock)
    assert not clock.steps
    clock.settled()
    assert clock.steps == [0.007]
    assert clock.medians() == {"forward": 0.007, "backward": 0.0, "step": 0.0}
