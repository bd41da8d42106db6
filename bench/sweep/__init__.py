"""Runs many benchmarks from one table: planned, run with resume and retries, summed up, drawn.

Behind ``benchmarks.py``.
"""
