#!/bin/bash
# Over MPI: srun starts every rank itself. SLURM needs a PMIx that fits the MPI: srun --mpi=list shows what it has.
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
srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" python train.py
