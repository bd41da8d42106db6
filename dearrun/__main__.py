"""``python -m dearrun``: the same as ``dearrun``."""

from dearrun.cli import main

main()
