#!/usr/bin/env bash
# Train handwritten digits on several workers:   bash mnist.sh     nworkers=4 bash mnist.sh --epochs 5
# Settings come from the environment, else from configs/envs.conf; further arguments go to examples/mnist.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$root/configs/envs.conf"
bash "$root/scripts/setup.sh"

flags=(-np "$nworkers")
if [ -z "$hostfile" ] && [ -f "$root/configs/cluster$nworkers" ]; then
    hostfile=$root/configs/cluster$nworkers
fi
if [ -n "$hostfile" ] && [ "$hostfile" != none ]; then
    for host in $(sed 's/#.*//' "$hostfile" | awk '{print $1}'); do
        getent hosts "$host" >/dev/null && continue
        echo "mnist.sh: $hostfile names the host $host, which this machine does not know" >&2
        echo "mnist.sh: remedy: write your hosts into it, or set hostfile=none to start all workers here" >&2
        exit 1
    done
    flags+=(--hostfile "$hostfile")
fi
if [ -n "$ETH_MPI_BTC_TCP_IF_INCLUDE" ]; then
    flags+=(--mca btl_tcp_if_include "$ETH_MPI_BTC_TCP_IF_INCLUDE")
fi
echo "mnist.sh: $nworkers worker(s) over $("$root/scripts/mpirun" --version | head -n 1)"
exec "$root/scripts/mpirun" "${flags[@]}" "${PY:-$root/.venv/bin/python}" "$root/examples/mnist.py" "$@"
