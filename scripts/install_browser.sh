#!/usr/bin/env bash
# Debian's chromium, in which tests/browser opens the page of `meshwright plan --html`. Nothing else needs it.
set -euo pipefail
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium fonts-dejavu-core
