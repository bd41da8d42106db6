"""Nothing hangs in silence: who waits for what, whether anybody can go on, and how a job ends."""
