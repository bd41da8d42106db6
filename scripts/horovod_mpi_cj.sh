#!/usr/bin/env bash
# One benchmark run, described by environment variables. Behind horovod_mpi_cj.sh in dear/, wfbp/, oss/ … and bench/baselines/:
#
#     cd dear; dnn=resnet50 bs=64 nworkers=4 ./horovod_mpi_cj.sh
#
# dnn=resnet50     a model of docs/benchmarks.md: resnet18 … densenet201 inceptionv4 vgg16 alexnet bert_base bert gpt2 mlp
# bs=64            samples per worker and step           senlen=64       words of a sentence (BERT, GPT-2)
# nworkers hostfile ETH_INTERFACE PY …                   as configs/envs.conf explains
# rdma=0           0: TCP over ETH_INTERFACE; 2: IP over IB_INTERFACE
# threshold=0      MB of a bucket, or 65536 and more elements; 0: the method's own; none: with num_nearby_layers=1, no fusion
# num_nearby_layers= layers of a bucket (dear)           tune=0          1: search sizes (dear, oss, mgwfbp, bytescheduler)
# exclude_parts=   reducescatter, allgather or both (dear)
# mgwfbp=1         0: leave gradients apart (mgwfbp/)    asc=0           1: the ASC rule (mgwfbp)
# use_zero=0       1: ZeroRedundancyOptimizer (ddp)      compressor=none fp16 or bf16: gradients in 16 bits (ours)
# WFSGD_TIMELINE=  record a timeline in this file; {rank} in its name gives every rank one
# small=0          1: inputs that a CPU manages          network=local   1gbit, 100mbit, …: emulated hosts, needs root
# emulate_compute= MODEL@DEVICE, e.g. resnet50@a100      dilate=1        stretch emulated compute, narrow links
#
# Further arguments go to `python -m bench.train`, which decides what the variables mean and refuses what a method does not do
# (bench/train/dears_flags.py). Files are those of the folder that this is called in.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${method:?the method is named by the script that calls this one}"
words=${senlen:-} # what was asked for, where something was
: "${dnn:=resnet50}" "${bs:=64}" "${senlen:=64}" "${rdma:=0}" "${small:=0}" "${network:=local}" "${emulate_compute:=}" "${dilate:=1}"

fail() {
    printf '%s: %s\n' "${method}" "$*" >&2
    exit 2
}
# What belongs to launchers that other toolkits have must not look as if it had counted.
for name in ngpu_per_node node_count node_rank; do
    [ -z "${!name:-}" ] || fail "$name=${!name}: the number of workers is nworkers, and their hosts are those of hostfile"
done
for name in LAUNCHBIN CODEHOME ETH_SCHEDULER_IP IB_SCHEDULER_IP WORKER_HOST_PREFIX; do
    [ -z "${!name:-}" ] || printf '%s: %s is ignored: it belongs to parameter servers, and there are none here\n' "$method" "$name" >&2
done

options=()
for name in threshold num_nearby_layers tune exclude_parts compressor nstreams asc use_zero; do
    [ -z "${!name:-}" ] || options+=("--${name//_/-}=${!name}")
done
# DeAR's benchmarks.py sets it for every method, and only these two look at it.
case $method in wfbp | mgwfbp) [ -z "${mgwfbp:-}" ] || options+=("--mgwfbp=$mgwfbp") ;; esac

named=${ETH_MPI_BTC_TCP_IF_INCLUDE:-}
. "$root/configs/envs.conf"
case $rdma in
    0) export ETH_MPI_BTC_TCP_IF_INCLUDE=${named:-$ETH_INTERFACE} ;;
    2)
        [ -n "$IB_INTERFACE" ] || fail "rdma=2 is IP over InfiniBand: name the interface in IB_INTERFACE"
        export ETH_MPI_BTC_TCP_IF_INCLUDE=$IB_INTERFACE
        ;;
    *) fail "rdma=$rdma: InfiniBand verbs are untested; use rdma=2 (IP over InfiniBand), or rdma=0 and OMPI_MCA_pml=ucx where Open MPI has UCX" ;;
esac
bash "$root/scripts/setup.sh"
. "$root/scripts/hostfile.sh"
flags=(--model "$dnn" --batch-size "$bs" --workers "$nworkers")
if [ "$network" = local ]; then
    choose_hostfile horovod_mpi_cj.sh
    [ -z "$chosen" ] || flags+=(--hostfile "$chosen")
else
    case $hostfile in '' | none) ;; *) fail "hostfile=$hostfile names real hosts, and network=$network emulates some" ;; esac
    flags+=(--network "$network")
fi
[ "$small" = 0 ] || flags+=(--small)
case $dnn in
    bert* | gpt2) [ "$small" != 0 ] && [ -z "$words" ] || flags+=(--sentence-len "$senlen") ;;
    *) [ -z "$words" ] || printf '%s: senlen=%s is ignored: %s has no sentences\n' "$method" "$words" "$dnn" >&2 ;;
esac
[ -z "$emulate_compute" ] || flags+=(--emulate-compute "$emulate_compute")
[ "$dilate" = 1 ] || flags+=(--dilate "$dilate")
[ -z "${WFSGD_TIMELINE:=}" ] || flags+=(--timeline "$WFSGD_TIMELINE")
flags+=("${options[@]}" "$@")
for ((i = 0; i < ${#flags[@]}; i++)); do # the folder is left below
    case ${flags[i]} in
        --json=[!/]* | --timeline=[!/]* | --hostfile=[!/]*) flags[i]=${flags[i]%%=*}=$PWD/${flags[i]#*=} ;;
        --json | --timeline | --hostfile)
            i=$((i + 1))
            case ${flags[i]:-} in [!/]*) flags[i]=$PWD/${flags[i]} ;; esac
            ;;
    esac
done
cd "$root" # so that the packages are found, and none of ours hides another of the same name
choose_python
exec "${python[@]}" -m bench.train --method "$method" "${flags[@]}"
