"""What ``horovod.torch`` and this project answer to the same calls: ``make compare-horovod``.

Tables of calls (`calls/`), of scripts (`scripts.py`) and of meant differences (`documented.py`, `numbers.py`); pure
functions that compare (`outcome.py`, `signature.py`, `judgement.py`); thin shells that run both sides (`worker.py`,
`job.py`, `__main__.py`). `test_comparison.py` tests what needs no Horovod.
"""
