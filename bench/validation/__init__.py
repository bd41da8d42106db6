"""Compares predictions of ``python -m dear.predict`` with measurements."""
