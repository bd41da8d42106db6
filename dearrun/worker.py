"""The small shell program that becomes a worker: it reports where it runs, and sets rank, threads and terminal (pure).

* It reports its host and process, so that dearrun can say of a worker that does not end where it is.
* It sets the variables by which torchrun tells workers of each other. Many scripts ask for them before ``dear.init()``, or
  call ``init_process_group()`` themselves: where they found nothing, each rank would train alone.
* Without ``OMP_NUM_THREADS``, it takes the cores of its host divided by the workers there: `overlap.job.cores`.
* With ``--restarts`` the worker's command is started, and started again, by an agent of torchrun's of its own.
* Rank 0 writes straight to where dearrun does, if it runs beside dearrun and is to be shown as it is. mpirun would put its
  rank in front of every line, and hold back what has no end of a line yet: a progress bar comes when all is over.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from overlap.job import cores

__all__ = ["HERE", "Streams", "restarting", "starting", "telling"]

#: Prints what no other machine, and no container of it with processes of its own, prints.
HERE = "cat /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/pid"

# Variables that a script may have exported keep their values: all that the shell sets for itself begins with its own word.
_RANK = "dearrun_rank=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; "
# $1: the address of rank 0's host, empty if it is not known; $2: the port. Not all mpiruns tell a rank of its host.
_TELL = (
    _RANK + "dearrun_size=${OMPI_COMM_WORLD_SIZE:-$PMI_SIZE}; "
    "dearrun_local_rank=${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}; "
    "dearrun_local_size=${OMPI_COMM_WORLD_LOCAL_SIZE:-$MPI_LOCALNRANKS}; "
    "dearrun_address=$1; "
    'if [ "$dearrun_rank" ] && [ "$dearrun_size" ]; then '
    'export RANK="$dearrun_rank" WORLD_SIZE="$dearrun_size"; '
    '[ -z "$dearrun_local_rank" ] || export LOCAL_RANK="$dearrun_local_rank"; '
    '[ -z "$dearrun_local_size" ] || export LOCAL_WORLD_SIZE="$dearrun_local_size"; '
    '[ "$dearrun_local_size" != "$dearrun_size" ] || dearrun_address=127.0.0.1; '
    '[ -z "$dearrun_address" ] || export MASTER_ADDR="${MASTER_ADDR:-$dearrun_address}" MASTER_PORT="${MASTER_PORT:-$2}"; '
    "fi; "
    'shift 2; exec "$@"'
)
_START = (
    _RANK
    + 'printf "\\036%s %s %s:%s:%s\\n" "$0" "$dearrun_rank" "$(uname -n)" $$ "$(cut -d" " -f22 /proc/$$/stat)" >&2; '
    'if [ -z "$OMP_NUM_THREADS" ]; then '
    'dearrun_threads=$("$1" -I -S "$2" "${OMPI_COMM_WORLD_LOCAL_SIZE:-$MPI_LOCALNRANKS}" $PPID 2>/dev/null); '
    '[ -z "$dearrun_threads" ] || export OMP_NUM_THREADS=$dearrun_threads; '
    "fi; "
    'if [ "$dearrun_rank" = 0 ] && [ "$3" ] && [ "$({ ' + HERE + '; } 2>/dev/null)" = "$3" ]; then '
    'if [ "$4" ] && (: >>"$4") 2>/dev/null; then exec >>"$4"; fi; '
    'if [ "$5" ] && (: >>"$5") 2>/dev/null; then exec 2>>"$5"; fi; '
    "fi; "
    'shift 5; exec "$@"'
)


# $1: how often the worker may be started again. Agents meet where ranks would; that of rank 0 has the store for all.
_RESTART = (
    'dearrun_restarts=$1; shift; exec "$0" -m dearrun.torchrun --nnodes "$WORLD_SIZE" --node-rank "$RANK" '
    '--nproc-per-node 1 --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "$MASTER_PORT" '
    '--max-restarts "$dearrun_restarts" --no-python "$@"'
)


@dataclass(frozen=True, slots=True)
class Streams:
    """The files that rank 0 writes to directly; empty: as the other ranks. `here`: the machine and container they are
    on.
    """

    here: str = ""
    out: str = ""
    err: str = ""


def telling(command: Sequence[str], address: str, port: int) -> list[str]:
    """The `command`, with its rank and the meeting place in its environment: see :class:`dearrun.meeting.Meeting`.

    A ``MASTER_ADDR`` or ``MASTER_PORT`` of the user's is kept.
    """
    return ["sh", "-c", _TELL, "sh", address, str(port), *command]


def restarting(command: Sequence[str], restarts: int) -> list[str]:
    """The `command`, started again up to so many times where it fails, in an environment of :func:`telling`."""
    return ["sh", "-c", _RESTART, sys.executable, str(restarts), *command]


def starting(command: Sequence[str], token: str, streams: Streams) -> list[str]:
    """The `command`, with begin and end reported, and its rank, threads and terminal set. Its report holds `token`."""
    return ["sh", "-c", _START, token, sys.executable, cores.__file__, streams.here, streams.out, streams.err, *command]
