"""``python -m dearrun.torchrun``: torchrun without its own messages about ranks that failed, which the caller shows."""

from __future__ import annotations

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["main"]


def main() -> None:
    """Run torchrun with the same arguments.

    Ends with 1 where a rank has failed, and with 128 and the signal that ended it.
    """
    logging.disable(logging.ERROR)
    try:
        run.run(run.parse_args(None))
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        sys.exit(128 - first.exitcode if first.exitcode < 0 else first.exitcode)


if __name__ == "__main__":
    main()
