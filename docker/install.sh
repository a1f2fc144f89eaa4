#!/usr/bin/env bash
# Installs Meshwright in this folder's clone as the README says, with the versions of docker/constraints.txt. The images call
# it; it works on any machine with Python and make. An argument names extras of pyproject.toml, which are installed as well.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_CONSTRAINT=${PIP_CONSTRAINT:-$PWD/docker/constraints.txt} PIP_NO_CACHE_DIR=1
make install
if [ -n "${1:-}" ]; then
  # Against the torch that is there, as their sources want it.
  .venv/bin/python -m pip install --quiet --no-build-isolation --editable ".[$1]"
fi
