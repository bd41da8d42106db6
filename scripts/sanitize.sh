#!/usr/bin/env bash
# Build comm_core with a sanitizer and run its tests so: the programs of tests/cpp, tests/comm_core at 2 ranks over MPI,
# TCP and several connections, processes; with the thread sanitizer, the programs that need no MPI.
#
#     scripts/sanitize.sh address|undefined|thread [pytest's arguments]
#
# Everything lies in build/sanitize-KIND; .venv stays as it is, and its packages are used. The first build takes minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:-}
case $kind in
address | undefined | thread) shift ;;
*) echo "usage: scripts/sanitize.sh address|undefined|thread (kind is '$kind') [pytest's arguments]" >&2 && exit 2 ;;
esac
folder=$PWD/build/sanitize-$kind
modules=$folder/modules
venv=$folder/venv
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')

PATH=$PWD/.venv/bin:$PATH cmake -G Ninja -S comm_core -B "$modules" -DSANITIZE="$kind" -DCOMM_CORE_WERROR=ON \
    -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1 -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DCOMM_CORE_CUDA_KERNELS=OFF \
    -DPython_EXECUTABLE="$PWD/.venv/bin/python" -Dpybind11_DIR="$(.venv/bin/python -m pybind11 --cmakedir)" >/dev/null
.venv/bin/cmake --build "$modules" --target comm_core _C _mpi _tcp

# An environment with the packages of .venv, in which comm_core's modules are those just built, in child processes too.
[ -x "$venv/bin/python" ] || .venv/bin/python -m venv --without-pip "$venv"
own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
cat >"$own/sanitized.py" <<PYTHON
import pathlib, site, sys
site.addsitedir("$packages")
for files in [finder.known_wheel_files for finder in sys.meta_path if hasattr(finder, "known_wheel_files")]:
    built = {path.name: str(path) for path in pathlib.Path("$modules").glob("*.so")}
    files.update({name: built.get(pathlib.Path(path).name, path) for name, path in files.items()})
PYTHON
echo "import sanitized" >"$own/sanitized.pth"

runtime() { "${CXX:-c++}" -print-file-name="$1"; }
preload=
# Python is not instrumented, so the runtime has to be there before it; and libstdc++, whose throw is replaced.
[ "$kind" != address ] || preload=$(runtime libasan.so):$(runtime libstdc++.so)
[ "$kind" != thread ] || preload=$(runtime libtsan.so):$(runtime libstdc++.so)
# Python and MPI keep memory until the process ends.
export ASAN_OPTIONS=detect_leaks=0
export UBSAN_OPTIONS=print_stacktrace=1
export CXXFLAGS="-fsanitize=$kind -fno-sanitize-recover=all -g1" PYTHONMALLOC=malloc OMP_NUM_THREADS=1
# mpi4py looks for an MPI in its own environment, which is not .venv here.
export LD_LIBRARY_PATH=$PWD/.venv/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
python() { env LD_PRELOAD="$preload" "$@"; }
pytest=("$venv/bin/python" -m pytest -q -p no:cacheprovider "$@")
status=0
run() { # run COMMAND...: pytest ends with 5 where arguments such as -k select nothing
    local code=0
    python "$@" || code=$?
    [ $code = 0 ] || [ $code = 5 ] || status=1
}
programs=(tests/cpp/test_schedules.py tests/cpp/test_engine.py)
if [ "$kind" = thread ]; then # MPI has threads of its own, which are not instrumented: what it says of them is noise
    run "${pytest[@]}" "${programs[@]}"
    exit $status
fi
# A runtime that reports crashes itself takes them from whoever else listens.
[ "$kind" != address ] || pytest+=(--deselect tests/comm_core_processes/test_thread.py::test_a_crash_of_the_engine_is_reported)
run "${pytest[@]}" "${programs[@]}" tests/cpp/test_mpi.py tests/comm_core_processes
for backend in mpi tcp sockets; do
    export COMM_CORE_TEST_BACKEND=$backend
    DEAR_SPMD_SUITE=spmd run scripts/mpirun -np 2 "${pytest[@]}" -p tests.spmd_plugin tests/comm_core
done
exit $status
