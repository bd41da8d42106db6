#!/usr/bin/env bash
# One benchmark run of fsdp; the environment variables are explained in scripts/horovod_mpi_cj.sh.
method=fsdp exec bash "$(dirname "${BASH_SOURCE[0]}")/../scripts/horovod_mpi_cj.sh" "$@"
