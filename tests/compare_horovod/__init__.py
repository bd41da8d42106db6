"""What ``horovod.torch`` and this project answer to the same calls: ``make compare-horovod``.

Tables of calls (`calls/`), of scripts (`scripts.py`) and of differences that are meant (`documented.py`); pure functions
that compare (`likeness.py`, `signature.py`, `judgement.py`); thin shells that run both sides (`worker.py`, `job.py`).
"""
