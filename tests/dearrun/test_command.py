"""Command lines of every kind of mpirun, hosts, and what is wrong with them."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dearrun import options, transport
from dearrun.addresses import has_address, resolved_elsewhere
from dearrun.check_build import Finding, render
from dearrun.command import Job, build
from dearrun.errors import LaunchError
from dearrun.hosts import Host, parse_hostfile, parse_hosts, require_addresses, require_shell, require_slots
from dearrun.mpirun import (
    Flavor,
    defaults,
    failure_ends,
    find,
    flavor_of,
    has_remote_shell,
    on_one_host,
    version_of,
    with_defaults,
)
from overlap.job.settings import read
from tests.harness import ROOT

TRAIN = ("python", "train.py", "--lr", "1")
HOSTS = (Host("a", 2), Host("b.example.org", 2))


@pytest.mark.parametrize(
    ("version", "flavor"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to", Flavor.OPEN_MPI_4),
        ("mpirun (Open MPI) 5.0.11", Flavor.OPEN_MPI_5),
        ("mpirun (Open MPI) 3.1.0", Flavor.OPEN_MPI_4),
        ("HYDRA build details:\n    Version:    4.0.2", Flavor.MPICH),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", Flavor.MPICH),
        ("something else", Flavor.OTHER),
    ],
)
def test_flavors(version: str, flavor: Flavor) -> None:
    assert flavor_of(version) is flavor


@pytest.mark.parametrize(
    ("flavor", "job", "expected"),
    [
        (Flavor.OPEN_MPI_4, {}, ["--tag-output"]),
        (Flavor.OPEN_MPI_5, {}, ["--output", "tag"]),
        (Flavor.MPICH, {}, ["-prepend-rank"]),
        (Flavor.OTHER, {}, []),
        (Flavor.OPEN_MPI_4, {"hosts": HOSTS, "tagged": False}, ["--host", "a:2,b.example.org:2"]),
        (Flavor.OPEN_MPI_5, {"hosts": HOSTS, "tagged": False}, ["--host", "a:2,b.example.org:2"]),
        (Flavor.MPICH, {"hosts": HOSTS, "tagged": False}, ["-hosts", "a:2,b.example.org:2"]),
        (Flavor.OPEN_MPI_4, {"passed": ("A", "B"), "tagged": False}, ["-x", "A", "-x", "B"]),
        (Flavor.MPICH, {"passed": ("A", "B"), "tagged": False}, []),  # hydra passes everything
        (
            Flavor.OPEN_MPI_4,
            {"interfaces": "eth0,eth1", "tagged": False},
            ["--mca", "btl_tcp_if_include", "eth0,eth1", "--mca", "oob_tcp_if_include", "eth0,eth1"],
        ),
        (
            Flavor.OPEN_MPI_5,
            {"interfaces": "eth0", "tagged": False},
            ["--mca", "btl_tcp_if_include", "eth0", "--prtemca", "prte_if_include", "eth0"],
        ),
        (Flavor.MPICH, {"interfaces": "eth0", "tagged": False}, ["-iface", "eth0"]),
        (
            Flavor.OPEN_MPI_4,
            {"ssh_port": 2222, "ssh_identity": "key", "tagged": False},
            ["--mca", "plm_rsh_args", "-p 2222 -i key"],
        ),
        (Flavor.OPEN_MPI_5, {"ssh_port": 2222, "tagged": False}, ["--prtemca", "plm_ssh_args", "-p 2222"]),
        (Flavor.OTHER, {"mpi_arguments": ("--fast", "1")}, ["--fast", "1"]),
    ],
)
def test_command_lines(flavor: Flavor, job: dict[str, Any], expected: list[str]) -> None:
    assert build("/bin/mpirun", flavor, Job(workers=4, command=TRAIN, **job)) == [
        "/bin/mpirun",
        "-np",
        "4",
        *expected,
        *TRAIN,
    ]


def test_output_goes_to_a_folder_of_every_rank() -> None:
    built = build("mpirun", Flavor.OPEN_MPI_5, Job(workers=2, command=TRAIN, output_folder="logs"))
    assert built[:5] == ["mpirun", "-np", "2", "sh", "-c"]
    assert built[6:] == ["logs", *TRAIN]


@pytest.mark.parametrize(
    ("flavor", "job", "message"),
    [
        (Flavor.MPICH, {"interfaces": "eth0,eth1"}, "takes one interface, and --network-interfaces names eth0,eth1"),
        (Flavor.MPICH, {"ssh_port": 22}, r"~/\.ssh/config"),
        (Flavor.OTHER, {"hosts": HOSTS, "ssh_port": 22}, "flags for -H, -p, -i"),
    ],
)
def test_what_an_mpirun_cannot_do_is_said(flavor: Flavor, job: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        build("mpirun", flavor, Job(workers=1, command=TRAIN, **job))


def test_hosts() -> None:
    assert parse_hosts("a:2, b.example.org:2") == list(HOSTS)
    assert parse_hosts("10.0.0.1") == [Host("10.0.0.1", 1)]
    text = "# cluster\na slots=2\n\nb:3   # fast\nc\nd slots = 4 max_slots=8\n"
    assert parse_hostfile(text, "f") == [Host("a", 2), Host("b", 3), Host("c", 1), Host("d", 4)]
    require_slots(HOSTS, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no host"),
        ("a:2,,b:2", "'' is no host"),
        ("a:two", "'a:two' is no host"),
        ("a:0", "a should have at least 1 slot and has 0"),
        ("a:1,a:2", "a is named twice"),
        ("-x:1", "'-x:1' is no host"),
    ],
)
def test_bad_hosts(text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=f"-H {re.escape(text)}.*{message}"):
        parse_hosts(text)


def test_bad_hostfiles_name_the_line() -> None:
    with pytest.raises(LaunchError, match=r"f, line 2: 'b slots=x' is no host"):
        parse_hostfile("a\nb slots=x\n", "f")
    with pytest.raises(LaunchError, match="f: names no host"):
        parse_hostfile("# nobody\n", "f")
    with pytest.raises(LaunchError, match=r"-np 5 needs 5 slots, and a:2,b\.example\.org:2 has 4"):
        require_slots(HOSTS, 5)


def test_other_hosts_need_a_way_to_them(tmp_path: Path) -> None:
    require_shell([Host("localhost"), Host("me")], "me", has_ssh=False)
    require_shell(HOSTS, "me", has_ssh=True)
    with pytest.raises(LaunchError, match="a is another host, and there is neither ssh nor rsh"):
        require_shell(HOSTS, "me", has_ssh=False)
    assert not has_remote_shell({"PATH": str(tmp_path)})
    assert has_remote_shell({"PATH": str(tmp_path), "OMPI_MCA_plm_rsh_agent": "./enter-namespace"})
    (tmp_path / "ssh").touch(mode=0o755)
    assert has_remote_shell({"PATH": str(tmp_path)})


def test_other_hosts_need_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_addresses([Host("localhost"), Host("me"), Host("known")], "me", {"known"}.__contains__)
    with pytest.raises(LaunchError, match=r"^b.example.org has no address: correct the name, or put it into DNS"):
        require_addresses(HOSTS, "me", {"a"}.__contains__)
    ssh = tmp_path / "ssh"  # as `ssh -G` shows what ~/.ssh/config says of a name
    ssh.write_text("#!/bin/sh\ncase $2 in alias) echo hostname 127.0.0.1;; behind) echo proxyjump gate;; esac\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert has_address("alias")
    assert has_address("behind")
    assert not has_address("no-such-host.invalid")
    ssh.write_text("#!/bin/sh\nexit 255\n")  # another program of that name
    assert has_address("no-such-host.invalid")
    assert not resolved_elsewhere({"hostname": "a", "proxyjump": "none"})


def _parsed(*argv: str, environ: dict[str, str] | None = None) -> tuple[Job, dict[str, str]]:
    args = options.parser().parse_args(argv)
    made = options.environment(args, environ or {})
    return options.job(args, made), made


def test_flags_become_the_workers_environment() -> None:
    flags = ["--timeline-filename", "t-{rank}.json", "--timeline-mark-cycles", "--log-level", "INFO"]
    flags += ["--fusion-threshold-mb", "8"]
    names = "PATH PYTHONPATH LD_LIBRARY_PATH OMP_NUM_THREADS MASTER_ADDR MASTER_PORT HOROVOD_X BYTESCHEDULER_X"
    mine = dict.fromkeys(["B", *names.split()], "8")
    job, environ = _parsed("-np", "2", "-x", "A=1=2", "-x", "B", *flags, *TRAIN, environ=mine)
    assert environ == {
        "A": "1=2",
        **mine,
        "DEAR_TIMELINE": "t-{rank}.json",
        "DEAR_TIMELINE_MARK_CYCLES": "1",
        "DEAR_LOG_LEVEL": "info",
        "DEAR_THRESHOLD_MB": "8",
    }
    assert (job.workers, job.command, set(job.passed)) == (2, TRAIN, set(environ))
    seconds = ["--no-stall-check", "--stall-check-shutdown-time-seconds", "9"]
    assert _parsed("-np", "2", *seconds, *TRAIN)[1] == {
        "DEAR_STALL_WARN_SECONDS": "0",
        "DEAR_STALL_ABORT_SECONDS": "9.0",
    }
    job, environ = _parsed("-np", "2", "--restarts", "3", *TRAIN)
    assert (job.restarts, environ, job.passed) == (3, {"DEAR_KEEP_GOING": "1"}, ("DEAR_KEEP_GOING",))


def test_hosts_say_how_many_workers(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=3\nb slots=2\n")
    assert _parsed("-H", "a:3", *TRAIN)[0].workers == 3
    assert _parsed("-hostfile", str(file), "--", *TRAIN)[0].workers == 5
    assert _parsed("-H", "a:3", "--network-interface", "eth0", "--network-interface", "eth1", *TRAIN)[0].interfaces == (
        "eth0,eth1"
    )
    assert _parsed("--hostfile", str(file), "-np", "4", "--mpi-args=--mca x 'y z'", *TRAIN)[0].mpi_arguments == (
        "--mca",
        "x",
        "y z",
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-np", "2"], "no command to run"),
        (["-np", "2", "train.py"], "dearrun -np 4 python train.py"),
        (["python", "train.py"], "how many workers"),
        (["-np", "3", "-H", "a:2", *TRAIN], "-np 3 needs 3 slots, and a:2 has 2"),
        (["-np", "2", "-hostfile", "/nope", *TRAIN], "hostfile cannot be read.*/nope"),
        (["-np", "2", "--mpi-args", "--foo 'bar", *TRAIN], "--foo 'bar.* cannot be taken apart: No closing quotation"),
        (["-np", "2", "-x", "UNSET_VARIABLE", *TRAIN], "UNSET_VARIABLE: the variable is not set"),
        (["-np", "2", "-x", "1A=2", *TRAIN], "'1A' is no name"),
        (["-np", "2", "--restarts", "1", "a", ":", "-np", "1", "b"], "--restarts is for one program"),
    ],
)
def test_mistakes(argv: list[str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        _parsed(*argv)


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--gloo", "torchrun"),
        ("--min-np=2", "--restarts N starts those again"),
        ("--autotune", "tune=True"),
        ("--cycle-time-ms=1", "cycle"),
        ("--fusion-threshold-mb=much", "should be a number of at least 0, or auto, and is much"),
        ("--stall-check-warning-time-seconds=soon", "should be a number of at least 0 and is soon"),
        ("--stall-check-shutdown-time-seconds=inf", "should be a number of at least 0 and is inf"),
        ("--fusion-threshold-mb=nan", "should be a number of at least 0, or auto, and is nan"),
        ("--fusion-threshold-mb=-1", "should be a number of at least 0, or auto, and is -1"),
        ("--ssh-port=two", "should be a whole number of at least 1 and is two"),
    ],
)
def test_flags_of_horovodrun_without_a_counterpart_say_why(
    flag: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parsed("-np", "2", flag, *TRAIN)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert flag.partition("=")[0] in said
    assert reason in said


# Of horovodrun 0.28.1, in its order; those with a value as they are written with one.
_FLAGS = """
-v --version -np=2 --num-proc=2 -cb --check-build --disable-cache --start-timeout=9 --network-interfaces=eth0
--network-interface=eth0 --output-filename=out --verbose --config-file=f --ssh-port=22 -p=22 --ssh-identity-file=k -i=k
--fusion-threshold-mb=8 --cycle-time-ms=1 --cache-capacity=9 --hierarchical-allreduce --no-hierarchical-allreduce
--hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
--autotune-log-file=f --autotune-warmup-samples=3 --autotune-steps-per-sample=3 --autotune-bayes-opt-max-samples=3
--autotune-gaussian-process-noise=0.8 --min-np=1 --min-num-proc=1 --max-np=4 --max-num-proc=4 --slots-per-host=2
--elastic-timeout=9 --reset-limit=3 --blacklist-cooldown-range=1 --timeline-filename=t.json --timeline-mark-cycles
--no-timeline-mark-cycles --no-stall-check --stall-check --stall-check-warning-time-seconds=9
--stall-check-shutdown-time-seconds=9 --mpi-threads-disable --no-mpi-threads-disable --mpi-args=--foo --tcp
--binding-args=--foo --num-nccl-streams=1 --thread-affinity=0 --gloo-timeout-seconds=9 --log-level=INFO
--log-with-timestamp --log-without-timestamp -prefix-timestamp --prefix-output-with-timestamp --log-hide-timestamp
--no-log-hide-timestamp -H=a:2 --hosts=a:2 -hostfile=f --hostfile=f --host-discovery-script=f --gloo --mpi --jsrun
"""
HOROVODRUN = _FLAGS.split()
DOCUMENT = (ROOT / "docs" / "dearrun.md").read_text()


@pytest.mark.parametrize("given", HOROVODRUN)
def test_every_flag_of_horovodrun_is_taken_or_refused_with_a_reason(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = given.partition("=")[0]
    try:
        options.parser().parse_args(
            [*(given.split("=") if flag[1] != "-" else [given]), *TRAIN]
        )  # -p 22, --ssh-port=22
    except SystemExit:
        assert f"dearrun has no {flag}: " in capsys.readouterr().err
    else:
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", DOCUMENT), f"{flag} is not in docs/dearrun.md"


@pytest.mark.needs_horovod
def test_those_are_the_flags_of_horovodrun() -> None:
    launch = importlib.import_module("horovod.runner.launch")
    known: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:

        def remember(parser: argparse.ArgumentParser, *_: object) -> None:
            known.update(flag for action in parser._actions for flag in action.option_strings)
            raise SystemExit

        patch.setattr(argparse.ArgumentParser, "parse_args", remember)
        patch.setattr(sys, "argv", ["horovodrun"])
        with pytest.raises(SystemExit):
            launch.parse_args()
    assert known - {"-h", "--help"} == {given.partition("=")[0] for given in HOROVODRUN}


def test_switches_win_over_the_environment() -> None:
    before = {"DEAR_TIMELINE_MARK_CYCLES": "1", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    assert _parsed("-np", "2", *TRAIN, environ=before)[1] == before
    off = ["--no-timeline-mark-cycles", "--stall-check"]
    assert _parsed("-np", "2", *off, *TRAIN, environ=before)[1] == dict.fromkeys(before, "0")
    assert read({"HOROVOD_STALL_CHECK_DISABLE": "0"}) == read({})


def test_comm_cores_variables_hold_whole_numbers_within_its_limits() -> None:
    told = (ROOT / "comm_core" / "csrc" / "settings.cpp").read_text()
    found = re.findall(r'read\("(COMM_CORE_\w+)", .*, (\d+), (\d+|1 << 30)\)', told)
    assert {name: (int(low), 1 << 30 if "<<" in high else int(high)) for name, low, high in found} == transport.RANGES
    for name, (low, high) in transport.RANGES.items():
        for text in ("", str(low), str(high), f"0{low}"):
            transport.check({name: text})
        for text in (str(low - 1), str(high + 1), "maybe", "+64", " 64", "64 ", "6_4", "٦٤"):
            with pytest.raises(
                LaunchError, match=re.escape(f"{name}={text}: expected an integer from {low} to {high}; ")
            ):
                transport.check({name: text})


def test_defaults_yield_to_the_caller(tmp_path: Path) -> None:
    assert defaults(Flavor.OPEN_MPI_4, None)["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert defaults(Flavor.OPEN_MPI_5, "/bin/false")["PRTE_MCA_plm_ssh_agent"] == "/bin/false"
    assert defaults(Flavor.MPICH, None) == {}
    name = "OMPI_MCA_mpi_yield_when_idle"
    found = with_defaults(Flavor.OPEN_MPI_4, {name: "0", "PATH": str(tmp_path), "EMPTY": ""})
    assert found.items() >= {name: "0", "PATH": str(tmp_path), "EMPTY": ""}.items()
    assert with_defaults(Flavor.OPEN_MPI_4, {name: ""})[name] == "1"


def test_workers_of_one_host_need_no_network() -> None:
    room = 2 * 64 * 2**20
    for flavor in (Flavor.OPEN_MPI_4, Flavor.OPEN_MPI_5):
        assert on_one_host(flavor, {"A": "1"}, 2, room) == {"A": "1", "OMPI_MCA_btl": "^tcp,ofi"}
        assert on_one_host(flavor, defaults(flavor, None), 2, room)["OMPI_MCA_btl"] == "^tcp,ofi"
        assert on_one_host(flavor, defaults(flavor, None), 3, room)["OMPI_MCA_btl"] == "^ofi"
        assert on_one_host(flavor, {"OMPI_MCA_btl": "tcp,self"}, 2, room) == {"OMPI_MCA_btl": "tcp,self"}
        assert on_one_host(flavor, {}, 3, room) == {}
    assert on_one_host(Flavor.MPICH, {}, 2, room) == {}
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE"):  # whose hosts Open MPI takes by itself
        assert on_one_host(Flavor.OPEN_MPI_5, {name: "7"}, 2, room) == {name: "7"}


def test_where_a_failed_worker_ends_the_job() -> None:
    for flavor in Flavor:
        assert failure_ends(flavor, {}, ()) is (flavor in (Flavor.OPEN_MPI_4, Flavor.OPEN_MPI_5))
    assert not failure_ends(Flavor.OPEN_MPI_4, {"OMPI_MCA_orte_abort_on_non_zero_status": "0"}, ())
    assert not failure_ends(Flavor.OPEN_MPI_5, {}, ("--continuous",))


def test_which_mpirun(tmp_path: Path) -> None:
    def program(folder: Path) -> str:
        (folder / "bin").mkdir(parents=True)
        path = folder / "bin" / "mpirun"
        path.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 9.9'\n")
        path.chmod(0o755)
        return str(path)

    chosen, installed, recorded, on_path = (program(tmp_path / name) for name in ("chosen", "venv", "record", "path"))
    venv, environ = tmp_path / "venv", {"PATH": str(tmp_path / "path" / "bin")}
    assert find(environ, tmp_path / "other") == on_path
    assert find(environ, venv) == installed
    (venv / "mpi.env").write_text(f"MPIRUN={recorded}\n")
    assert find(environ, venv) == recorded
    assert find({**environ, "MPIPATH": str(tmp_path / "chosen")}, venv) == chosen
    assert flavor_of(version_of(chosen)) is Flavor.OPEN_MPI_5
    with pytest.raises(LaunchError, match=r"MPIPATH is /nope, and there is no bin/mpirun"):
        find({"MPIPATH": "/nope"}, venv)
    with pytest.raises(LaunchError, match=r"no mpirun was found.*torchrun"):
        find({"PATH": ""}, tmp_path / "other")
    with pytest.raises(LaunchError, match="does not run"):
        version_of(str(tmp_path / "absent"))


def test_report() -> None:
    text = render("1.0", [("Things", [Finding(True, "one", ("here",)), Finding(False, "other")])])
    assert text == "dear 1.0:\n\nThings:\n    [X] one\n        here\n    [ ] other\n"


def test_a_hostfile_in_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"h\xe9te slots=2\n")
    with pytest.raises(LaunchError, match="hostfile cannot be read: 'utf-8'"):
        _parsed("-hostfile", str(file), *TRAIN)
