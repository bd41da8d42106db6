"""Finds out how this process was launched and who is in the job, and runs services beside training."""
