"""The prediction of ``python -m dear.predict`` held to papers: ``python -m bench.validation.papers``."""
