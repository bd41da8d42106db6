#!/usr/bin/env bash
# Train handwritten digits on several workers:   bash mnist.sh     nworkers=4 bash mnist.sh --epochs 5
# Settings come from the environment, else from configs/envs.conf; further arguments go to examples/mnist.py.
# gpuids=0,1: the GPUs that workers see. rdma=2: IP over IB_INTERFACE.
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
case ${rdma:-0} in
    0) ;;
    2) ETH_MPI_BTC_TCP_IF_INCLUDE=${IB_INTERFACE:?rdma=2 is IP over InfiniBand: name the interface in IB_INTERFACE} ;;
    *) echo "mnist.sh: rdma=$rdma is ignored: InfiniBand verbs are not supported; rdma=2 is IP over InfiniBand" >&2 ;;
esac
[ -z "${gpuids:-}" ] || export CUDA_VISIBLE_DEVICES=$gpuids
if [ -n "$ETH_MPI_BTC_TCP_IF_INCLUDE" ]; then
    flags+=(--mca btl_tcp_if_include "$ETH_MPI_BTC_TCP_IF_INCLUDE")
fi
[ -t 2 ] || export TQDM_DISABLE="${TQDM_DISABLE:-1}" # in a log file a line an epoch is progress enough
case " $* " in
    *" --data-dir "* | *" --data-dir="* | *" --download "*) data=MNIST ;;
    *) data="the digits that come with scikit-learn" ;;
esac
choose_python
echo "mnist.sh: $data, $nworkers worker(s) over $("$root/scripts/mpirun" --version | head -n 1)"
exec "$root/scripts/mpirun" "${flags[@]}" "${python[@]}" "$root/examples/mnist.py" "$@"
