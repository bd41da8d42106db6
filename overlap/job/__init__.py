"""How this process was launched, who is in the job, and what runs beside training."""
