"""Mutations by hand, and the test that catches each: what the tests are worth.

    python -m tests.mutations                 all of them: minutes
    python -m tests.mutations plan -k pause   those of one table, whose promise contains a word

A table is a file beside this one, for a part of the code. A new promise gets a row: break it, and see a test fail.
"""
