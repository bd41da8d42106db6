"""Tensor parallelism: layers whose weights are divided among ranks, beside data parallelism.

import model_parallel
model_parallel.init()
model_parallel.initialize_model_parallel(2)                     # pairs of neighbouring ranks share a model
layer = model_parallel.ColumnParallelLinear(1024, 4096)
"""

from model_parallel.cross_entropy import vocab_parallel_cross_entropy
from model_parallel.initialize import (
    destroy_model_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_mesh,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_pipeline_parallel_group,
    get_pipeline_parallel_ranks,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from model_parallel.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from model_parallel.mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from model_parallel.parallelize import parallelize
from model_parallel.random import checkpoint, get_rng_tracker, model_parallel_manual_seed
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "checkpoint",
    "copy_to_model_parallel_region",
    "destroy_model_parallel",
    "gather_from_model_parallel_region",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_mesh",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_ranks",
    "get_rng_tracker",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "model_parallel_manual_seed",
    "parallelize",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "vocab_parallel_cross_entropy",
]
__all__ += api.__all__
