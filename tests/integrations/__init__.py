"""Real libraries over dear; they are listed in requirements-integrations.txt, which ``make test`` installs."""
