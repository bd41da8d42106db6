"""Group sharding and communication with groups, of the published OSDP: BERT learns masked words on several hosts.

scripts/script_bert_training.sh                                   # four ranks; one machine stands for two hosts
mode=group_sharding scripts/script_bert_training.sh --large
torchrun --nproc-per-node 4 examples/osdp/train_bert.py --mode communication_with_groups --nnodes 2

    none                        sharded among all ranks
    group_sharding              sharded among the ranks of a host; gradients are averaged over hosts
    communication_with_groups   sharded among all ranks; what travels goes within hosts, and once between them

Rank 0 prints samples and words per second, the median step, the most that a rank had in memory, what a host has sent in a
step, and the loss, which is the same in all three.
"""

from __future__ import annotations

import argparse
import functools
import os

import torch
from experiment import Run, add_sizes, refuse, shape_of
from transformer import Shape, bert, masked_words

import fsdp
from fsdp import FSDP, auto_wrap, default_auto_wrap_policy, enable_wrap, gen_fsdp_args, wrap

MODES = ("none", "group_sharding", "communication_with_groups")
LARGE = {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "vocab_size": 30528,  # BERT's 30,522, made a multiple of 8
    "seq_length": 512,
    "train_batch_size": 1,
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train BERT in groups of ranks.")
    parser.add_argument("--mode", choices=MODES, default="none")
    parser.add_argument("--nnodes", type=int, help="hosts; default: those of the job, and of a single one 2")
    parser.add_argument("--nproc_per_node", type=int, help="ranks of each; default: equal parts of the job")
    parser.add_argument("--large", action="store_true", help="BERT-Large: 24 layers of 1024, 512 words")
    parser.add_argument("--min_num_params", type=float, default=1e6, help="of what is wrapped (%(default)g)")
    add_sizes(
        parser,
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        vocab_size=8192,
        seq_length=64,
        train_batch_size=2,
        steps=5,
    )
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    if parser.parse_args(argv).large:  # what the command line gives counts
        parser.set_defaults(**LARGE)
    return parser.parse_args(argv)


def groups(args: argparse.Namespace) -> tuple[int, int]:
    """Hosts, and ranks of each: those that were given, or that the job has. Once it has begun."""
    hosts = args.nnodes
    if hosts is None:
        hosts = fsdp.cross_size() if fsdp.cross_size() > 1 else 2
    return hosts, fsdp.size() // max(1, hosts) if args.nproc_per_node is None else args.nproc_per_node


def sharded(args: argparse.Namespace, shape: Shape) -> torch.nn.Module:
    """The model, in wrappers. Raises ``ValueError`` for groups that the job does not have."""
    hosts, ranks = groups(args)
    fsdp_args = gen_fsdp_args(nnodes=hosts, nproc_per_node=ranks, gsdp_type=args.mode, model_type="bert-large")
    with fsdp.deferred_init():  # each rank makes its share of the values alone
        model = bert(shape)
    with enable_wrap(wrapper_cls=FSDP, **fsdp_args):
        policy = functools.partial(default_auto_wrap_policy, min_num_params=int(args.min_num_params))
        wrapped = auto_wrap(model, auto_wrap_policy=policy)
        return wrapped if isinstance(wrapped, FSDP) else wrap(wrapped)  # of a small model, nothing else is


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    try:
        shape = shape_of(args)
    except ValueError as error:
        refuse(error)
    if args.mode == "none":
        os.environ.setdefault(
            "DEAR_TWO_LEVEL", "0"
        )  # or a probe might choose two levels, which are to be compared with
    fsdp.init()
    torch.manual_seed(args.seed)
    try:
        model = sharded(args, shape)
    except ValueError as error:
        refuse(error)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    run = Run(args, model, optimizer, functools.partial(masked_words, args.train_batch_size, shape))
    run.report(run.measure(args.mode, shape))
    fsdp.shutdown()


if __name__ == "__main__":
    main()
