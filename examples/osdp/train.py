"""The experiment of the published OSDP: a GPT-2-like decoder, sharded under a memory limit, or freed after each use.

scripts/script_gpt2_training.sh                                   # four ranks, at sizes of one machine
torchrun --nproc-per-node 2 examples/osdp/train.py --fsdp_type OSDP --device_memory_limit 700
torchrun --nproc-per-node 2 examples/osdp/train.py --fsdp_type FSDP --hidden_size 1536 --num_hidden_layers 48 …

Rank 0 prints samples and words per second, the median step, the most that a rank had in memory, and the loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from experiment import Run, add_sizes, refuse, shape_of
from transformer import Block, Shape, Transformer, gpt, next_words

import fsdp
import osdp
from fsdp import FSDP, auto_wrap, enable_wrap
from osdp import OptimalShardedDataParallel as OSDP


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT-2-like decoder under a memory limit.")
    parser.add_argument("--fsdp_type", choices=["OSDP", "FSDP"], default="OSDP", help="FSDP frees all after each use")
    add_sizes(
        parser,
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        vocab_size=8192,
        seq_length=64,
        train_batch_size=2,
        steps=10,
    )
    parser.add_argument("--lr", type=float, default=6e-4)
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> Shape:
    """The sizes of the model. Raises ``ValueError`` for what cannot be trained."""
    shape = shape_of(args)
    if args.fsdp_type == "OSDP" and args.device_memory_limit is None:
        raise ValueError("--fsdp_type OSDP needs --device_memory_limit MB, under which it plans; FSDP needs none")
    return shape


def _is_block(module: torch.nn.Module, recurse: bool, unwrapped_params: int) -> bool:
    return recurse or isinstance(module, Block)


def wrapped(args: argparse.Namespace, shape: Shape) -> tuple[torch.nn.Module, Callable[[], int] | None]:
    """The model, sharded, and what tells this rank's peak of memory, where the wrapper does."""
    with fsdp.deferred_init():  # each rank makes its share of the values alone
        model: Transformer = gpt(shape)
    if args.fsdp_type == "OSDP":
        sharded = OSDP(model, [shape.layers, shape.hidden, shape], args.device_memory_limit)
        return sharded, lambda: sharded.peak_bytes or 0
    with enable_wrap(wrapper_cls=FSDP):
        return FSDP(auto_wrap(model, auto_wrap_policy=_is_block)), None


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    try:
        shape = check(args)
    except ValueError as error:
        refuse(error)
    osdp.init()
    torch.manual_seed(args.seed)
    model, peak = wrapped(args, shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    run = Run(args, model, optimizer, partial(next_words, args.train_batch_size, shape))
    try:
        run.report(run.measure(args.fsdp_type, shape, peak))
    except MemoryError as error:
        refuse(error)
    osdp.shutdown()


if __name__ == "__main__":
    main()
