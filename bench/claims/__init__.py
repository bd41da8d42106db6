"""The numbers in README.md and docs, and the results in ``docs/results`` that they come from."""
