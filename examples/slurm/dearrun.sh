#!/bin/bash
# Over MPI: dearrun starts the ranks on the hosts of the allocation, by ssh or as its mpirun finds best.
#SBATCH --job-name=dear
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
set -eu
cd "$SLURM_SUBMIT_DIR"
# shellcheck source=/dev/null
. .venv/bin/activate
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/:$SLURM_NTASKS_PER_NODE/" | paste -sd,)
dearrun -np "$SLURM_NTASKS" -H "$hosts" -x OMP_NUM_THREADS python train.py
