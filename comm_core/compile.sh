#!/usr/bin/env bash
# Build comm_core from this checkout into the active Python environment, with its MPI backend where mpicc is found.
#
#     bash comm_core/compile.sh                           options are those of pip install
#     MPICC=/opt/mpich/bin/mpicc bash comm_core/compile.sh
set -euo pipefail
exec python -m pip install --no-deps "$@" --editable "$(dirname "${BASH_SOURCE[0]}")/.."
