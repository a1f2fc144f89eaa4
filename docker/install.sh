#!/usr/bin/env bash
# Installs Meshwright in this folder's clone as the README says, with the versions of docker/constraints.txt. The images call
# it; it works on any machine with Python and make.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_CONSTRAINT=${PIP_CONSTRAINT:-$PWD/docker/constraints.txt} PIP_NO_CACHE_DIR=1
make install
