#!/usr/bin/env bash
# The fast tests with the newest torch that can be had, in build/newest: a checkout of what is committed here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
here=$PWD/build/newest
if [ -d "$here/.git" ]; then
    git -C "$here" fetch --quiet origin HEAD
    git -C "$here" reset --quiet --hard FETCH_HEAD
else
    git clone --quiet . "$here"
fi
cd "$here"
export INSTEAD='torch>2.13'
bash scripts/setup.sh
.venv/bin/python -c 'import torch; print("torch", torch.__version__)'
DEAR_TESTS=fast .venv/bin/python -m pytest tests -n 3 --dist worksteal
