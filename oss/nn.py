"""Stands in for ``fairscale.nn``, which has no counterpart: importing it raises ``ImportError`` with alternatives."""

from oss.fairscale import NOT_HERE

raise ImportError(NOT_HERE["nn"], name=__name__)
