"""Views of pipelines beside data parallelism (read ``docs/results/pipeline``, else pure)."""

from __future__ import annotations

from bench.claims.source import Source
from bench.pipeline.result import Pipelines, markdown

__all__ = ["PIPELINES"]


def pipelines(source: Source) -> str:
    """pipelines NAME: ``docs/results/pipeline/NAME.json``, as ``bench.pipeline --json`` writes it."""
    return markdown(Pipelines(**source.raw(f"pipeline/{source.words[0]}.json")))


PIPELINES = (pipelines,)
