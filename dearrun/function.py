"""``python -m dearrun.function``: a rank of :func:`dearrun.run.run`. Calls what the caller sends, and sends the result."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from dearrun import exchange, pickling
from overlap.job import launch

__all__ = ["main"]


def main() -> None:
    """Call the function, send its result, and end as a script does; after an exception, wait for the caller to end it."""
    place = launch.detect(os.environ)
    connection, payload = exchange.call(os.environ, place.rank, place.size)
    del os.environ[exchange.VARIABLE]  # what the function starts is not to have the key
    returned = threading.Event()
    threading.Thread(target=_end_without, args=(connection, returned), daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        paths, source, call = cloudpickle.loads(payload)
        sys.path += [path for path in paths if path not in sys.path]
        pickling.remember(*source)
        function, args, kwargs = cloudpickle.loads(call)
        content = _pickled(function(*args, **kwargs))
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        lines = traceback.format_exception(type(error), error, trace)
        exchange.reply(connection, _sendable(error), "".join(lines), lines[-1].strip())
        signal.pause()  # other ranks may be about to raise as well
        raise
    returned.set()
    exchange.reply(connection, content)


def _end_without(connection: Connection[Any, Any], returned: threading.Event) -> None:
    """Nobody waits for what this rank does any more when the caller has gone."""
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        if not returned.is_set():
            os._exit(1)


def _pickled(result: Any) -> bytes:
    try:
        return pickling.dumps(result)
    except Exception as error:
        raise TypeError(f"the function returned a {type(result).__name__}, which cannot be pickled: {error}") from error


def _sendable(error: BaseException) -> bytes:
    """The exception, or one with the same words where it cannot travel."""
    try:
        content = pickling.dumps(error)
        cloudpickle.loads(content)
    except Exception:
        return pickling.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return content


if __name__ == "__main__":
    main()
