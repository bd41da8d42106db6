"""The prediction of ``python -m dear.predict`` held to measurement."""
