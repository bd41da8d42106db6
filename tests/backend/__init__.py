"""torch.distributed over our engine, asked as torch's own tests ask a backend: by torch's functions and by nothing else.

Each of these files runs inside every rank, over the backend that ``DEAR_TEST_C10D`` names: `dear`, or `gloo`, which shows
that the tests themselves are right. What gloo cannot do is skipped there, and nowhere else.
"""
