"""Processes that a server forks are what a start would have made of them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver

WHAT = """
import json, os, resource, signal, sys, torch
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "main": __name__, "file": globals().get("__file__"), "cwd": os.getcwd(),
    "variable": os.environ.get("SAID"), "threads": torch.get_num_threads(), "cores": sorted(os.sched_getaffinity(0)),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "umask": os.umask(0), "in": sys.stdin.read(),
    "net": os.readlink("/proc/self/ns/net"), "interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
}))
"""
IN_SERVER = "import os; print('DEAR_TESTS_PID' in os.environ)"


def _ran(*command: str, real: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    env = forkserver.environment({**os.environ, "SAID": "so", **options.pop("env", {})}, real_start=real)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, **options)


def _python(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return _ran(sys.executable, *argv, **options)


@pytest.mark.parametrize("kind", ["script", "-c", "-m"])
def test_it_finds_what_a_started_process_finds(kind: str, tmp_path: Path) -> None:
    (tmp_path / "what.py").write_text(WHAT)
    words = {"script": ["what.py"], "-c": ["-c", WHAT], "-m": ["-m", "what"]}[kind]

    def others() -> None:
        os.umask(0o27)
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    threads = {"OMP_NUM_THREADS": "2"} if kind == "script" else {}
    forked, started = (
        _python(*words, "--with", "a word", real=real, env=threads, cwd=tmp_path, input="typed", preexec_fn=others)
        for real in (False, True)
    )
    assert forked.returncode == started.returncode == 0, forked.stderr + started.stderr
    assert json.loads(forked.stdout) == json.loads(started.stdout)


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('the reason')",
        "raise SystemExit",
        "raise ValueError('what is wrong')",
        "import os; os._exit(7)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit, threading; atexit.register(print, 'last'); threading.Thread(target=print, args=['before']).start()",
    ],
)
def test_it_ends_as_a_started_process_ends(text: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(text)
    forked, started = (_python("script.py", real=real, cwd=tmp_path) for real in (False, True))
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_files_that_it_inherits_keep_their_numbers() -> None:
    read, write = os.pipe()
    with os.fdopen(read) as pipe:
        done = _python("-c", f"import os; os.write({write}, b'through')", pass_fds=[write])
        os.close(write)
        assert (done.returncode, pipe.read()) == (0, "through"), done.stderr


def test_signals_reach_it_and_it_does_not_outlive_its_client() -> None:
    text = "import os, signal, sys; print(os.getpid(), flush=True); signal.pause()"
    env = forkserver.environment(os.environ)
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, "-c", text], env=env, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            assert child != process.pid
            process.send_signal(number)
            assert process.wait(60) == -number
            process.stdout.read()  # until the child, too, has closed it
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "env", "forked"),
    [
        ([], {}, True),
        (["-u"], {}, True),
        (["-O"], {}, False),
        (["-W", "error"], {}, False),
        ([], {"TORCH_LOGS": "+dynamo"}, False),
        ([], {"PYTHONHASHSEED": "1"}, False),
        ([], {forkserver.VARIABLE: "/nowhere"}, False),
    ],
)
def test_what_cannot_be_forked_starts(options: list[str], env: dict[str, str], forked: bool) -> None:
    done = _python(*options, "-c", IN_SERVER, env=env)
    assert done.stdout.split() == [str(forked)], done.stderr


@pytest.mark.real_start
def test_a_test_may_ask_for_real_starts() -> None:
    done = subprocess.run([sys.executable, "-c", IN_SERVER], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_ranks_hash_and_draw_differently() -> None:
    text = "import numpy, random; print(hash('a'), numpy.random.rand(), random.random())"
    found = [_python("-c", text, env={"RANK": rank}).stdout.split() for rank in ("0", "1", "0")]
    assert found[0][0] != found[1][0]
    assert found[0][0] == found[2][0]
    assert len({tuple(draws) for _, *draws in found}) == 3


@pytest.mark.needs_root
def test_it_enters_the_namespaces_of_its_client() -> None:
    text = (
        "import os, socket; print(os.readlink('/proc/self/ns/net'), socket.gethostname(), os.listdir('/sys/class/net'))"
    )
    enter = [
        "unshare",
        "--net",
        "--uts",
        "--mount",
        "sh",
        "-c",
        'hostname apart && mount -t sysfs none /sys && exec "$@"',
        "-",
    ]
    forked, started = (_ran(*enter, sys.executable, "-c", text, real=real) for real in (False, True))
    assert "apart" in forked.stdout, forked.stderr
    assert forked.stdout.split()[1:] == started.stdout.split()[1:]
    assert forked.stdout.split()[0] != os.readlink("/proc/self/ns/net")


def test_servers_and_their_children_end_with_whoever_started_them() -> None:
    text = f"""
import os, signal, subprocess, sys
from tests import forkserver
with forkserver.listening():
    env = forkserver.environment(os.environ)
    child = "import os, signal; print(os.getpid(), os.getppid(), flush=True); signal.pause()"
    subprocess.Popen([{sys.executable!r}, "-c", child], env=env)
    signal.pause()
"""
    env = forkserver.environment(os.environ, real_start=True)
    starter = subprocess.Popen([sys.executable, "-c", text], env=env, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    child, server = map(int, starter.stdout.readline().split())
    starter.kill()
    starter.wait()
    starter.stdout.read()  # until all of them have closed it
    for number in (child, server):
        assert not Path(f"/proc/{number}/cmdline").exists() or Path(f"/proc/{number}/cmdline").read_text() == ""
