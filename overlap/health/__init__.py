"""Finds out which rank waits for what, whether the job can still go on, and ends it with a report if not."""
