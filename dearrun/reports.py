"""Has each worker report its begin and end to dearrun, which derives its own exit status from that (pure).

An mpirun that loses its connection to another host may end with status 0, whatever became of the job. So a small shell
stays beside every worker and, once that has ended, reports its status in a line of stderr. It travels as all output does,
over the connection in question. dearrun takes these lines out, and without one from every worker it does not end with 0.
A line before says where the worker runs (`dearrun.worker`): of one that does not end, dearrun says where it is.
Whether a worker uses MPI or `dear` makes no difference.

Of a script's worker the report also says whether it ended without having called ``dear.init()``, which writes into a file
that the shell holds open.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dearrun.command import Job
from dearrun.mpirun import Flavor
from overlap.job.launch import ALONE_VARIABLE

__all__ = ["Place", "Reports", "is_script", "obstacle", "reporting"]

_BEGIN = "\x1e"  # "record separator": held back until its line is whole, and nearly no program writes it
_LONGEST = 120  # bytes of a report
_TAG = rb"\[[^\]\n]*\](?:<stderr>)?:? ?"  # that mpirun puts in front of a line
_TAG_BEGINS = re.compile(rb"(?:^|\n)(\[[^\]\n]{0,99}(?:\](?:<[stder]{0,6}>?)?:? ?)?)$")

# What the shell says itself, such as "Terminated", goes nowhere; the worker keeps stderr. Which numbers are free for it and
# for the watched worker's file is tried, since some MPIs hand open files to their workers. The file has no name any more
# when the worker begins: whoever kills both leaves none. Signals are sent to the shell as well: it waits for the worker.
# The report comes twice: where mpirun cuts what it forwards into blocks, one of the two is whole. A worker that a signal
# ended looks to mpirun as if it had no shell.
_SHELL = (
    f"unset {ALONE_VARIABLE}; file=; "
    "trap 'rm -f \"$file\"; exit 143' HUP INT QUIT TERM USR1 USR2; "
    "free() { for fd in 9 8 7 6 5 4 3; do { true >&$fd; } 2>/dev/null || return 0; done; return 1; }; "
    'free; out=$fd; eval "exec $out>&2 2>/dev/null"; '
    'if [ "$1" ] && free && file="$(trap "" HUP INT QUIT TERM USR1 USR2; mktemp "${TMPDIR:-/tmp}/dearrun.XXXXXX")"; then '
    f'eval "exec $fd>\\"\\$file\\""; rm -f "$file"; export {ALONE_VARIABLE}="/proc/$$/fd/$fd"; '
    "else fd=$out; fi; "
    "shift; "
    "trap : HUP INT QUIT TERM USR1 USR2; "
    'eval "(exec \\"\\$@\\" 2>&$out $out>&- $fd>&-)"; '
    "status=$?; "
    "alone=; "
    f'[ -z "${ALONE_VARIABLE}" ] || [ -s "${ALONE_VARIABLE}" ] || alone=" alone"; '
    'report="$(printf "\\036")$0 ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} $status$alone"; '
    'eval "printf \'%s\\n%s\\n\' \\"\\$report\\" \\"\\$report\\" >&$out"; '
    "if [ $status -gt 128 ]; then "
    "ulimit -c 0; trap - HUP INT QUIT TERM USR1 USR2; kill -$((status - 128)) $$; "
    "fi; "
    "exit $status"
)
# Names of mpirun's options, and of MCA parameters, with which stderr may not be where dearrun reads it.
_ELSEWHERE = re.compile(r"output|outfile|errfile|merge|xml|xterm|stderr")
_MCA = re.compile(r"--?[a-z]*mca")  # an option with two words behind it, the first of which is a name


def obstacle(flavor: Flavor, job: Job) -> str:
    """The reason why this job's workers cannot report their ends; empty where they can.

    That is where this mpirun is known to bring every worker's stderr to dearrun, and all workers run one command.
    """
    if flavor is Flavor.OTHER:
        return "this mpirun is neither Open MPI nor MPICH"
    if job.several_programs:
        return "the command starts several programs"
    redirecting = next((name for name in _names(job.mpi_arguments) if _ELSEWHERE.search(name)), None)
    return f"with {redirecting} of --mpi-args their stderr may go elsewhere" if redirecting else ""


def _names(words: Sequence[str]) -> Iterator[str]:
    """The options among an mpirun's arguments, without their values; of MCA parameters, their names."""
    left = iter(words)
    for word in left:
        if _MCA.fullmatch(word):
            yield next(left, "")
            next(left, None)
        elif word.startswith("-"):
            yield word.partition("=")[0]


def is_script(command: Sequence[str]) -> bool:
    """Whether the command runs Python, and no function of ``dear.run``: such a function need not be a training."""
    name = command[0].rpartition("/")[2]
    return (name.startswith("python") or name.endswith(".py")) and "dearrun.function" not in command


def reporting(command: Sequence[str], token: str, *, watched: bool) -> list[str]:
    """`command`, whose end is reported by lines that hold `token`; if `watched`, with whether init() was called."""
    return ["sh", "-c", _SHELL, token, "watched" if watched else "", *command]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs: the name of its host, the number of its process there, and when that began.

    The last is in ticks of the host's clock since it was started. Numbers come again, with other beginnings.
    """

    host: str
    process: int
    began: int


class Reports:
    """The reports of a job of so many workers."""

    def __init__(self, token: str, workers: int, *, tagged: bool) -> None:
        self._workers, self._tagged = workers, tagged
        self._places: dict[int, Place] = {}  # by rank
        self._statuses: dict[int, int] = {}  # by rank
        self._alone: set[int] = set()  # watched ranks that have ended without dear.init()
        begin = _BEGIN.encode()
        self._report = re.compile(
            rb"(" + _TAG + rb")?" + begin + token.encode() + rb" (\d+) (?:(\d+)( alone)?|(\S+):(\d+):(\d+))\r?\n"
        )
        self._begin, self._held = begin, b""

    def without(self, chunk: bytes) -> bytes:
        """The output that has come, without the reports, which are noted. What may become a report is held back."""
        text = self._report.sub(self._note, self._held + chunk)
        start = self._where_one_begins(text)
        self._held = text[start:]
        return text[:start]

    def _where_one_begins(self, text: bytes) -> int:
        """Where what may become a report begins, with the tag in front of it; behind `text` if nothing may."""
        start = text.rfind(self._begin)
        if start >= 0 and b"\n" not in text[start:] and len(text) - start <= _LONGEST:
            return text.rfind(b"\n", 0, start) + 1
        tag = _TAG_BEGINS.search(text) if self._tagged else None
        return tag.start(1) if tag else len(text)

    def rest(self) -> bytes:
        """The output that was held back, when nothing more comes."""
        rest, self._held = self._held, b""
        return rest

    def _note(self, found: re.Match[bytes]) -> bytes:
        tag, rank, status, alone, host, process, began = found.groups()
        if status is None:
            self._places[int(rank)] = Place(host.decode(errors="replace"), int(process), int(began))
            return b""
        self._statuses[int(rank)] = int(status)
        if alone:
            self._alone.add(int(rank))
        return b"" if tag or not self._tagged else b"\n"  # behind a last line without an end

    @property
    def failed(self) -> bool:
        """Whether a worker has reported a status that is not 0."""
        return any(self._statuses.copy().values())

    def left(self) -> dict[int, Place]:
        """The places of the workers that have begun and not ended, by rank."""
        return {rank: self._places[rank] for rank in sorted(set(self._places) - set(self._statuses))}

    def verdict(self) -> tuple[int, str]:
        """The job's status and a message about it, where mpirun's status is 0."""
        missing = [rank for rank in range(self._workers) if rank not in self._statuses]
        if not missing:
            return max(self._statuses.values()), ""
        named = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return 1, (
            f"mpirun ended with status 0, but the end of {len(missing)} of {self._workers} workers was not reported (ranks "
            f"{named}): the connection to their hosts was probably lost; see what still runs there, and start "
            "the job again"
        )

    def strangers(self) -> str:
        """A warning for a job in which no rank has called ``dear.init()``, if they met nowhere else; else empty."""
        if len(self._alone) < self._workers:
            return ""
        return (
            f"{self._workers} processes ran, and none of them called dear.init() or made torch.distributed's group: if "
            "they were to train together, each has trained alone"
        )
