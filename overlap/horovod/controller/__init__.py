"""How ranks agree on what happens by name, in one order for all. Nothing here knows a collective."""
