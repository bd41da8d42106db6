"""Found by Python before a test's script runs: ends a process without a last look at what torch has made.

Twice at its end Python goes through all objects for cycles among them; with torch's compiler imported, as the first
optimizer does, that is a second of processor time, a quarter of what most processes that tests start take. Whatever a
name refers to is let go of as ever; what only a cycle keeps is not.
"""

import atexit
import gc
import sys


@atexit.register  # the first to be registered is the last to run
def _freeze() -> None:
    if "torch" in sys.modules:
        gc.freeze()
