"""What a job over the backend does when it starts, ends, or goes wrong: whole processes, which are watched from outside."""
