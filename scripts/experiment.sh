# Sourced by script_gpt2_training.sh and script_bert_training.sh.
#
# experiment FILE ARGUMENTS…: trains with a file of examples/osdp on $nworkers ranks, as configs/envs.conf describes.
experiment() {
    local file=$1 flags
    shift
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    : "${nworkers:=4}"
    . "$root/configs/envs.conf"
    if ! [[ $nworkers =~ ^[1-9][0-9]*$ ]]; then
        printf '%s: nworkers should be a whole number of at least 1 and is %s\n' "$file" "$nworkers" >&2
        exit 2
    fi
    bash "$root/scripts/setup.sh"
    . "$root/scripts/hostfile.sh"
    case " $* " in *" -h "* | *" --help "*) nworkers=1 ;; esac # one answer, not one per worker
    flags=(-np "$nworkers")
    choose_hostfile "$file"
    [ -z "$chosen" ] || flags+=(--hostfile "$chosen" --map-by slot) # ranks of a host have consecutive numbers
    if [ -n "$ETH_MPI_BTC_TCP_IF_INCLUDE" ]; then
        flags+=(--mca btl_tcp_if_include "$ETH_MPI_BTC_TCP_IF_INCLUDE")
    fi
    choose_python
    exec "$root/scripts/mpirun" "${flags[@]}" "${python[@]}" "$root/examples/osdp/$file" "$@"
}
