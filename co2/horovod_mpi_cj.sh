#!/usr/bin/env bash
# One benchmark run of co2; the environment variables are explained in scripts/horovod_mpi_cj.sh.
method=co2 exec bash "$(dirname "${BASH_SOURCE[0]}")/../scripts/horovod_mpi_cj.sh" "$@"
