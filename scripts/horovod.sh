#!/usr/bin/env bash
# Build Horovod 0.28.1 into .venv, with the MPI of comm_core and with gloo: the baseline of the benchmarks. Some five minutes.
#
#     make horovod
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
venv=$PWD/.venv
log=$venv/horovod.log
version=0.28.1

imports() { # under mpirun, which finds the MPI of .venv
    "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("horovod") is None)' &&
        scripts/mpirun -np 1 "$venv/bin/python" -c 'import sys, horovod.torch as h; sys.exit(not (h.mpi_built() and h.gloo_built()))'
}
imports 2>/dev/null && echo "horovod: ready" && exit 0

compiler=${CXX:-$(PATH=$PATH type -P c++ || type -P g++)}
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
# Horovod asks for C++14 and C++17, and today's torch headers need C++20. Its gloo has headers that name types of <array> and
# <cstdint>, which older compilers brought along.
cat >"$tools/c++20" <<EOF
#!/usr/bin/env bash
arguments=(-include array -include cstdint)
for argument in "\$@"; do
    case \$argument in -std=*++1[147]) argument=-std=gnu++20 ;; esac
    arguments+=("\$argument")
done
exec "$compiler" "\${arguments[@]}"
EOF
chmod +x "$tools/c++20"

echo "horovod: building $version for torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)'); log in $log"
"$venv/bin/python" -m pip install --quiet setuptools wheel >"$log" 2>&1 || true
build() { # build OPTION...: of pip install
    # Its gloo is older than the oldest CMake that today's one imitates by itself.
    PATH="$venv/bin:$PATH" CXX="$tools/c++20" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
        HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 MAKEFLAGS="-j$(nproc)" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        "$venv/bin/python" -m pip install --no-build-isolation "$@" "${HOROVOD_SOURCE:-horovod==$version}" >>"$log" 2>&1
}
if ! build; then
    grep -m 5 -E 'error:|Error' "$log" >&2 || tail -n 20 "$log" >&2
    echo "horovod: could not be built (whole log: $log); benchmarks run without it" >&2
    exit 1
fi
# What pip keeps of an earlier build may be for another torch or MPI, or without gloo.
if ! imports 2>>"$log"; then
    echo "horovod: pip's stored build does not fit; building anew"
    build --no-cache-dir --force-reinstall --no-deps
    imports
fi
echo "horovod: ready"
