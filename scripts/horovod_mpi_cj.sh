#!/usr/bin/env bash
# One benchmark run, described by environment variables. Behind horovod_mpi_cj.sh in dear/, wfbp/, oss/ … and bench/baselines/:
#
#     cd dear; dnn=resnet50 bs=64 nworkers=4 ./horovod_mpi_cj.sh
#
# dnn=resnet50     resnet50 densenet201 inceptionv4 vgg16 bert_base bert gpt2 mlp
# bs=64            samples per worker and step           senlen=64       words of a sentence (BERT, GPT-2)
# nworkers hostfile ETH_INTERFACE …                      as configs/envs.conf explains
# rdma=0           0: TCP over ETH_INTERFACE; 2: IP over IB_INTERFACE
# threshold=0      MB of a bucket; 0: the method's own   exclude_parts=  reducescatter, allgather or both (dear)
# use_zero=0       1: ZeroRedundancyOptimizer (ddp)      asc=0           1: the ASC rule (mgwfbp)
# small=0          1: inputs that a CPU manages          network=local   1gbit, 100mbit, …: emulated hosts, needs root
# emulate_compute= MODEL@DEVICE, e.g. resnet50@a100      dilate=1        stretch emulated compute, narrow links
#
# Further arguments go to `python -m bench.train`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${method:?the method is named by the script that calls this one}"
: "${dnn:=resnet50}" "${bs:=64}" "${senlen:=64}" "${rdma:=0}" "${threshold:=0}" "${exclude_parts:=}" "${use_zero:=0}"
: "${asc:=0}" "${compressor:=none}" "${nstreams:=1}" "${small:=0}" "${network:=local}" "${emulate_compute:=}" "${dilate:=1}"

fail() {
    printf '%s: %s\n' "${method}" "$*" >&2
    exit 2
}
[ "$compressor" = none ] || fail "compressor=$compressor is not supported; use compressor=none"
[ "$nstreams" = 1 ] || fail "nstreams=$nstreams: all communication of a rank is one stream; use nstreams=1"
case $rdma in
    0) ;;
    2) export ETH_MPI_BTC_TCP_IF_INCLUDE=${IB_INTERFACE:?rdma=2 is IP over InfiniBand: name the interface in IB_INTERFACE} ;;
    *) fail "rdma=$rdma: InfiniBand verbs are not supported; use rdma=0 (TCP) or rdma=2 (IP over InfiniBand)" ;;
esac

options=()
if [ "$threshold" != 0 ]; then
    case $method in
        dear | oss) options+=("threshold_mb=$threshold") ;;
        ddp) options+=("bucket_mb=$threshold") ;;
        horovod) options+=("fusion_mb=$threshold") ;;
        *) fail "threshold=$threshold: $method has no such setting" ;;
    esac
fi
if [ -n "$exclude_parts" ]; then
    [ "$method" = dear ] || fail "exclude_parts=$exclude_parts belongs to dear"
    options+=("exclude_parts=${exclude_parts//,/ }")
fi
if [ "$asc" != 0 ]; then
    [ "$method" = mgwfbp ] || fail "asc=$asc belongs to mgwfbp"
    options+=("asc=True")
fi
if [ "$use_zero" != 0 ]; then
    [ "$method" = ddp ] || fail "use_zero=$use_zero belongs to ddp"
    method=ddp-zero
fi

. "$root/configs/envs.conf"
bash "$root/scripts/setup.sh"
. "$root/scripts/hostfile.sh"
flags=(--model "$dnn" --batch-size "$bs" --workers "$nworkers")
if [ "$network" = local ]; then
    choose_hostfile horovod_mpi_cj.sh
    [ -z "$chosen" ] || flags+=(--hostfile "$chosen")
else
    flags+=(--network "$network")
fi
if [ "$small" != 0 ]; then
    flags+=(--small)
else
    case $dnn in bert* | gpt2) flags+=(--sentence-len "$senlen") ;; esac
fi
[ -z "$emulate_compute" ] || flags+=(--emulate-compute "$emulate_compute" --dilate "$dilate")
spec=$method$(printf ',%s' "${options[@]}" | sed 's/^,/:/; s/^:$//')
cd "$root" # so that the packages are found, and none of ours hides another of the same name
exec "${PY:-$root/.venv/bin/python}" -m bench.train --method "$spec" "${flags[@]}" "$@"
