"""What a schedule can reach, by simulation: one computing thread and one wire. Pure."""
