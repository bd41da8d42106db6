"""Fragments of the model that are averaged in turn: "streaming-diloco" and "sparseloco". The design is in `rounds.py`."""
