#!/usr/bin/env bash
# Train a GPT-2-like decoder under a memory limit, as the published OSDP's script of this name:
#
#     scripts/script_gpt2_training.sh                        the most of the model that fits stays whole
#     fsdp_type=FSDP scripts/script_gpt2_training.sh         all of it is freed after each use, to compare
#
# fsdp_type=OSDP               or FSDP
# device_memory_limit=1024     MB of 2^20 bytes that a rank's process may take
# nworkers=4 hostfile= PY= …   as configs/envs.conf explains
#
# Further arguments go to examples/osdp/train.py: --hidden_size 1536 --num_hidden_layers 48 --train_batch_size 1 --profile …
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called by sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/experiment.sh"
experiment train.py --fsdp_type "${fsdp_type:-OSDP}" --device_memory_limit "${device_memory_limit:-1024}" "$@"
