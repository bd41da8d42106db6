#!/usr/bin/env bash
# One benchmark run of oss; the environment variables are explained in scripts/horovod_mpi_cj.sh.
method=oss exec bash "$(dirname "${BASH_SOURCE[0]}")/../scripts/horovod_mpi_cj.sh" "$@"
