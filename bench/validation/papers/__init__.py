"""Compares predictions of ``python -m dear.predict`` with papers: ``python -m bench.validation.papers``."""
