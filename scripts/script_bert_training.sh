#!/usr/bin/env bash
# Train BERT in groups of ranks, as the published OSDP's script of this name:
#
#     mode=group_sharding scripts/script_bert_training.sh            two hosts of two ranks; one machine stands for both
#     mode=communication_with_groups scripts/script_bert_training.sh --large
#
# mode=none                    or group_sharding, communication_with_groups
# nworkers=4 hostfile= PY= …   as configs/envs.conf explains; hosts have equally many ranks
#
# Further arguments go to examples/osdp/train_bert.py: --nnodes 4 --device_memory_limit 8192 --steps 20 …
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called by sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/experiment.sh"
experiment train_bert.py --mode "${mode:-none}" "$@"
