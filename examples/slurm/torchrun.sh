#!/bin/bash
# Without MPI: srun starts one torchrun on each host, which starts the ranks there.
#SBATCH --job-name=dear
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -eu
cd "$SLURM_SUBMIT_DIR"
# shellcheck source=/dev/null
. .venv/bin/activate
ranks=2 # on each host
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ranks))
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" train.py
