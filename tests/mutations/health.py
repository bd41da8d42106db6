"""Jobs that hang, fail, and are started again; collectives by name."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

_WATCHDOG = "tests/overlap/health/test_watchdog.py -k "
_DEADLOCK = "tests/overlap/health/test_deadlock.py -k "
_FAILURES = "tests/overlap/health/test_failures.py -k "
_ENDINGS = "tests/overlap/health/test_endings.py -k "
_STORE = "tests/overlap/elastic/test_store.py -k "
_ELASTIC = "mpi-2 tests/spmd/test_elastic.py -k "
_COORDINATOR = "tests/overlap/horovod/test_coordinator.py -k "

MUTATIONS: list[Mutation] = [
    # Health
    Mutation(
        "what a rank that has just left handed to its threads is waited for",
        "overlap/health/watchdog.py",
        "left = self._left_for(_GRACE_SECONDS)",
        "left = self._left_for(0)",
        _WATCHDOG + "has_left",
    ),
    Mutation(
        "a rank that goes on ends no job because another one has left",
        "overlap/health/watchdog.py",
        "left and here.still_seconds > _GRACE_SECONDS",
        "left",
        _WATCHDOG + "has_left",
    ),
    Mutation(
        "a rank that has left is not waited for, though it answers",
        "overlap/health/watchdog.py",
        "if rank in gone or self._is_silent(rank)]",
        "if self._is_silent(rank)]",
        _WATCHDOG + "has_left",
    ),
    Mutation(
        "a rank that leaves waits for others that leave",
        "overlap/health/watchdog.py",
        "gone = self._left_for(self._abort_after) if training else []",
        "gone = self._left_for(self._abort_after)",
        _WATCHDOG + "has_left",
    ),
    Mutation(
        "a rank that computes has as long as any after another one has left",
        "overlap/health/watchdog.py",
        "gone = self._left_for(self._abort_after)",
        "gone = self._left_for(_GRACE_SECONDS)",
        _WATCHDOG + "has_left",
    ),
    Mutation(
        "a rank that does not answer once is not lost",
        "overlap/health/watchdog.py",
        "return time.monotonic() - since > self._abort_after * _SILENT",
        "return since < math.inf",
        _WATCHDOG + "answer",
    ),
    Mutation(
        "a rank that answers again is not lost",
        "overlap/health/watchdog.py",
        "for rank, answer in answers.items() if answer is None\n        }",
        "for rank in {*self._unanswered, *(rank for rank, answer in answers.items() if answer is None)}\n        }",
        _WATCHDOG + "answer",
    ),
    Mutation(
        "others are asked before the limit, so that it holds for who never answers",
        "overlap/health/watchdog.py",
        "doubted = self._is_older(work, _DOUBTED) and",
        "doubted = False and",
        _WATCHDOG + "answer",
    ),
    Mutation(
        "the limit holds in every state",
        "overlap/health/watchdog.py",
        "if lost or (dead and silent):",
        "if training and (lost or (dead and silent)):",
        _WATCHDOG + "every_state",
    ),
    Mutation(
        "what ended while others were asked ends no job",
        "overlap/health/watchdog.py",
        'or getattr(work, "done", bool)():',
        "or False:",
        _WATCHDOG + "were_asked",
    ),
    Mutation(
        "who asks waits for no store",
        "overlap/health/watchdog.py",
        "while self._asking.is_alive() and time.monotonic() < until and",
        "while self._asking.is_alive() and",
        _WATCHDOG + "holds_nobody_up",
    ),
    Mutation(
        "who computes and goes on is not given up",
        "overlap/health/deadlock.py",
        "answer.still_seconds == 0 and answer.quiet_seconds > seconds]",
        "answer.still_seconds == 0]",
        _WATCHDOG + "given_up",
    ),
    Mutation(
        "a rank that is out of data is not reported as late",
        "overlap/health/watchdog.py",
        " and not quiet and not self.is_patient()",
        " and not quiet",
        _WATCHDOG + "patient",
    ),
    Mutation(
        "a rank that waits aborts a job in which nobody goes on",
        "overlap/health/watchdog.py",
        "min(rank for rank, answer in answers.items() if answer and answer.waits)",
        "min(rank for rank, answer in answers.items() if answer)",
        _WATCHDOG + "nobody_goes_on",
    ),
    Mutation(
        "threads that have ended are not waiting",
        "overlap/health/watchdog.py",
        "(thread for thread in (self._names.threads if self._names else ()) if thread in alive)",
        "(thread for thread in (self._names.threads if self._names else ()))",
        _WATCHDOG + "can_be_told",
    ),
    Mutation(
        "a job in which a rank waits in a collective is aborted, not told",
        "overlap/health/watchdog.py",
        "can_be_told=all(waits) and not unfinished",
        "can_be_told=all(waits)",
        _WATCHDOG + "can_be_told",
    ),
    Mutation(
        "of a communicator on host and device what has come further counts",
        "overlap/health/watchdog.py",
        "Line(max(line.issued, other.issued),",
        "Line(min(line.issued, other.issued),",
        _WATCHDOG + "come_further",
    ),
    Mutation(
        "a late operation is reported once in each period",
        "overlap/health/watchdog.py",
        "            self._last_warning = now\n",
        "            pass\n",
        _WATCHDOG + "goes_on_being_reported",
    ),
    Mutation(
        "a long transfer is no deadlock",
        "overlap/health/deadlock.py",
        "all(line.issued > oldest for line in lines)",
        "all(line.issued > oldest + 1 for line in lines)",
        _DEADLOCK + "given_up",
    ),
    Mutation(
        "collectives that never match are a deadlock",
        "overlap/health/deadlock.py",
        "return len(kinds) == 1 and all(",
        "return all(",
        _DEADLOCK + "given_up",
    ),
    Mutation(
        "who has issued what this rank waits in is not behind",
        "overlap/health/deadlock.py",
        "line.issued <= waits[name]",
        "line.issued <= waits[name] + 1",
        _DEADLOCK + "behind",
    ),
    Mutation(
        "the second session of a process ends its job at an exception",
        "overlap/health/failures.py",
        "        sys.excepthook = _previous\n        _previous = None\n",
        "        sys.excepthook = _previous\n",
        _FAILURES + "each_session",
    ),
    Mutation(
        "numbers of a process set are not taken for ranks of the job",
        "overlap/health/failures.py",
        "found is not None and int(found[1]) == size",
        "found is not None",
        _FAILURES + "lost_its_connection",
    ),
    Mutation(
        "sys.exit() shows no traceback at shutdown()",
        "overlap/health/failures.py",
        "if size > 1 and isinstance(error, Exception):",
        "if size > 1 and error is not None:",
        _FAILURES + "inside_an_exception",
    ),
    Mutation(
        "other exceptions keep their traceback after a wrong setting was caught",
        "overlap/health/failures.py",
        "        if not issubclass(raised, kind):\n            previous(raised, error, trace)\n            return\n",
        "",
        _FAILURES + "one_line",
    ),
    Mutation(
        "letters that go by themselves are not named as given up",
        "overlap/health/shutdown.py",
        " if work.op not in UNCOUNTED]",
        "]",
        "tests/overlap/health/test_shutdown.py -k named",
    ),
    Mutation(
        "no rank is blamed where the store is out of reach",
        "overlap/health/failures.py",
        """    "torch.distributed's store, which is out of reach",\n""",
        "",
        _ENDINGS + "at_once",
    ),
    # Elastic jobs
    Mutation(
        "what a sampler recorded and nobody committed is forgotten when a job goes back",
        "overlap/elastic/sampler.py",
        '        self.processed_indices = set(state_dict["processed_indices"])\n        self._news = []\n',
        '        self.processed_indices = set(state_dict["processed_indices"])\n',
        _ELASTIC + "nobody_committed",
    ),
    Mutation(
        "an epoch begins with all of its samples",
        "overlap/elastic/sampler.py",
        "        self.processed_indices = set()\n        self._news = []\n        self.reset()\n",
        "        self.processed_indices = set()\n        self.reset()\n",
        _ELASTIC + "nobody_committed",
    ),
    Mutation(
        "sync() keeps what any rank's sampler recorded",
        "overlap/elastic/state.py",
        "                value.exchange()\n        captured",
        "                pass\n        captured",
        _ELASTIC + "sync_keeps",
    ),
    Mutation(
        "a signal to any rank stops all",
        "overlap/elastic/state.py",
        "all_reduce(asked, asked, ReduceOp.MAX,",
        "all_reduce(asked, asked, ReduceOp.MIN,",
        _ELASTIC + "signal",
    ),
    Mutation(
        "an optimizer wrapped after the state was made is committed with its state",
        "overlap/elastic/state.py",
        "values[name] = _live(value).state_dict()",
        "values[name] = value.state_dict()",
        _ELASTIC + "going_back and after",
    ),
    Mutation(
        "a process that was asked to stop may train again",
        "overlap/elastic/stop_request.py",
        "    _asked.clear()\n    if",
        "    if",
        "tests/overlap/elastic/test_stop_request.py -k begin_again",
    ),
    Mutation(
        "a handler of the script's own stays",
        "overlap/elastic/stop_request.py",
        " or signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:",
        ":",
        "tests/overlap/elastic/test_stop_request.py -k own_stays",
    ),
    Mutation(
        "a commit that can be read again is kept",
        "overlap/elastic/store.py",
        "                self._unreadable.discard(number)\n",
        "",
        _STORE + "read_again",
    ),
    Mutation(
        "a finished job leaves nothing of one that was killed while it wrote",
        "overlap/elastic/store.py",
        'self.directory.glob("commit-*.partial")',
        'self.directory.glob("commit-*.part")',
        _STORE + "leaves_nothing",
    ),
    Mutation(
        "a lock of another job is left where it is",
        "overlap/elastic/lock.py",
        "    if _is_still(file, directory / _NAME):\n",
        "    if True:\n",
        _STORE + "left_where",
    ),
    Mutation(
        "a lock that somebody removed is taken again",
        "overlap/elastic/lock.py",
        "if mine is not None and _is_still(mine, path):",
        "if mine is not None:",
        _STORE + "removed_meanwhile",
    ),
    # Collectives by name
    Mutation(
        "what the last join completes comes before the join",
        "overlap/horovod/controller/coordinator.py",
        "return self._decide([*others, key])",
        "return self._decide([key, *others])",
        _COORDINATOR + "last_join",
    ),
    Mutation(
        "ranks that had joined a job that was given up are asked again",
        "overlap/horovod/controller/coordinator.py",
        "        self._waiting.clear()\n        self._joined.clear()\n",
        "        self._waiting.clear()\n",
        _COORDINATOR + "given_up",
    ),
    Mutation(
        "what was given up fails once",
        "overlap/horovod/controller/coordinator.py",
        "        self._waiting.clear()\n        self._joined.clear()\n",
        "        self._joined.clear()\n",
        _COORDINATOR + "given_up",
    ),
    Mutation(
        "what waits in other sets goes on when a set is removed",
        "overlap/horovod/controller/coordinator.py",
        "for key in list(self._waiting) if key[0] == number]",
        "for key in list(self._waiting)]",
        _COORDINATOR + "come_and_go",
    ),
    Mutation(
        "all ranks are a set already",
        "overlap/horovod/controller/coordinator.py",
        "if alike or request.ranks == self._sets[0]:",
        "if alike:",
        _COORDINATOR + "come_and_go",
    ),
    Mutation(
        "join() returns the last rank that joined",
        "overlap/horovod/controller/coordinator.py",
        "list(self._joined)[-1]",
        "list(self._joined)[0]",
        _COORDINATOR + "answered_with_the_last",
    ),
]
