#!/usr/bin/env bash
# Train handwritten digits on several workers:   bash mnist.sh     nworkers=4 bash mnist.sh --epochs 5
# Settings come from the environment, else from configs/envs.conf; further arguments go to examples/mnist.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$root/configs/envs.conf"
bash "$root/scripts/setup.sh"

flags=(-np "$nworkers")
unknown_host() { # unknown_host FILE: the first host in it that this machine does not know
    local host
    for host in $(sed 's/#.*//' "$1" | awk '{print $1}'); do
        getent hosts "$host" >/dev/null || { echo "$host" && return; }
    done
}
if [ -n "$hostfile" ] && [ "$hostfile" != none ]; then
    [ -f "$hostfile" ] || { echo "mnist.sh: there is no hostfile $hostfile" >&2 && exit 1; }
    host=$(unknown_host "$hostfile")
    if [ -n "$host" ]; then
        echo "mnist.sh: $hostfile names the host $host, which this machine does not know" >&2
        echo "mnist.sh: remedy: correct it, or set hostfile=none to start all workers here" >&2
        exit 1
    fi
    flags+=(--hostfile "$hostfile")
elif [ -z "$hostfile" ] && [ -f "$root/configs/cluster$nworkers" ]; then
    host=$(unknown_host "$root/configs/cluster$nworkers")
    if [ -z "$host" ]; then
        flags+=(--hostfile "$root/configs/cluster$nworkers")
    else
        echo "mnist.sh: configs/cluster$nworkers names $host, which is unknown here: starting all workers on this machine"
    fi
fi
if [ -n "$ETH_MPI_BTC_TCP_IF_INCLUDE" ]; then
    flags+=(--mca btl_tcp_if_include "$ETH_MPI_BTC_TCP_IF_INCLUDE")
fi
[ -t 2 ] || export TQDM_MININTERVAL="${TQDM_MININTERVAL:-10}" # a log file wants few lines of progress
echo "mnist.sh: $nworkers worker(s) over $("$root/scripts/mpirun" --version | head -n 1)"
exec "$root/scripts/mpirun" "${flags[@]}" "${PY:-$root/.venv/bin/python}" "$root/examples/mnist.py" "$@"
