#!/usr/bin/env bash
# Train handwritten digits on several workers:   bash mnist.sh     nworkers=4 bash mnist.sh --epochs 5
# Settings come from the environment, else from configs/envs.conf; further arguments go to examples/mnist.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$root/configs/envs.conf"
if ! [[ $nworkers =~ ^[1-9][0-9]*$ ]]; then
    printf 'mnist.sh: nworkers should be a whole number of at least 1 and is %s\n' "$nworkers" >&2
    exit 2
fi
bash "$root/scripts/setup.sh"
. "$root/scripts/hostfile.sh"

case " $* " in *" -h "* | *" --help "*) nworkers=1 ;; esac # one answer, not one per worker
flags=(-np "$nworkers")
choose_hostfile mnist.sh
[ -z "$chosen" ] || flags+=(--hostfile "$chosen")
if [ -n "$ETH_MPI_BTC_TCP_IF_INCLUDE" ]; then
    flags+=(--mca btl_tcp_if_include "$ETH_MPI_BTC_TCP_IF_INCLUDE")
fi
[ -t 2 ] || export TQDM_DISABLE="${TQDM_DISABLE:-1}" # in a log file a line an epoch is progress enough
echo "mnist.sh: $nworkers worker(s) over $("$root/scripts/mpirun" --version | head -n 1)"
exec "$root/scripts/mpirun" "${flags[@]}" "${PY:-$root/.venv/bin/python}" "$root/examples/mnist.py" "$@"
