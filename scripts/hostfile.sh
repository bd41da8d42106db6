# Sourced by mnist.sh and scripts/horovod_mpi_cj.sh, after configs/envs.conf.
#
# choose_python: sets the array `python` to $PY, which may hold arguments after the program ("/opt/python -W ignore").
choose_python() {
    if [ -z "${PY:-}" ] || [ -x "$PY" ]; then
        python=("${PY:-$root/.venv/bin/python}")
    else
        read -ra python <<<"$PY"
    fi
}

# choose_hostfile PROGRAM: sets `chosen` to the full path of the hostfile to use, or to nothing for this machine. Follows $hostfile, then
# configs/cluster$nworkers where all its hosts are known; explains itself on standard output or fails on standard error.
unknown_host() { # unknown_host FILE: the first host in it that this machine does not know
    local host
    for host in $(sed 's/#.*//' "$1" | awk '{print $1}'); do
        getent hosts "$host" >/dev/null || { echo "$host" && return; }
    done
}
choose_hostfile() {
    local host ours=$root/configs/cluster$nworkers
    chosen=''
    if [ -n "$hostfile" ] && [ "$hostfile" != none ]; then
        [ -f "$hostfile" ] || { echo "$1: there is no hostfile $hostfile" >&2 && exit 1; }
        host=$(unknown_host "$hostfile")
        if [ -n "$host" ]; then
            echo "$1: $hostfile names the host $host, which this machine does not know" >&2
            echo "$1: remedy: correct it, or set hostfile=none to start all workers here" >&2
            exit 1
        fi
        case $hostfile in
            /*) chosen=$hostfile ;;
            *) chosen=$PWD/$hostfile ;;
        esac
    elif [ -z "$hostfile" ] && [ -f "$ours" ]; then
        host=$(unknown_host "$ours")
        if [ -z "$host" ]; then
            chosen=$ours
        else
            echo "$1: configs/cluster$nworkers names $host, which is unknown here: starting all workers on this machine"
        fi
    fi
}
