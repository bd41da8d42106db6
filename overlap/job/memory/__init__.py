"""Memory: how much there is and how much a process has taken (`counted`), and what the ranks of a host share."""
