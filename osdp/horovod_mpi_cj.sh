#!/usr/bin/env bash
# One benchmark run of osdp; the environment variables are explained in scripts/horovod_mpi_cj.sh.
method=osdp exec bash "$(dirname "${BASH_SOURCE[0]}")/../scripts/horovod_mpi_cj.sh" "$@"
