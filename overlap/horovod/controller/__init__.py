"""Has all ranks agree on which operations happen by name, and in which order. Nothing here knows a collective."""
