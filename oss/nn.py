"""fairscale's ``fairscale.nn`` has no counterpart: importing this raises ``ImportError`` with what there is instead."""

from oss.fairscale import NOT_HERE

raise ImportError(NOT_HERE["nn"], name=__name__)
