#!/usr/bin/env bash
# What one GPU tells of Meshwright in less than 590 s, most valuable first. Run it in the repository's root, on a machine with torch
# >= 2.11 for CUDA and transformers >= 5.17:
#
#   OUT=/tmp/gpu bash scripts/gpu/one_gpu.sh           rows in $OUT/rows.jsonl, the table of docs/gpu.md in $OUT/table.md
#   OUT=/tmp/gpu bash scripts/gpu/one_gpu.sh --tiny    all programs on a CPU in tiny sizes, which shows only that they run
#
# Pure Python packages that the machine lacks are looked for in .site (docs/gpu.md says how to fill it). This folder may be
# elsewhere, for instance copied to .gpu.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tiny=${1:-}
export OUT=${OUT:-/tmp/gpu} PYTHONPATH=$PWD:$PWD/.site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True} # as ranks have it
python=${PYTHON:-python3}
mkdir -p "$OUT"
rm -f "$OUT/rows.jsonl"

part() { # seconds, name, command: a part that hangs ends, and the next one begins
  local seconds=$1 name=$2
  shift 2
  [ -z "$tiny" ] || seconds=600 # of a machine that may be busy
  echo && echo "=== $name (at ${SECONDS} s)"
  timeout "$seconds" "$@" 2>&1 | tee "$OUT/${name// /_}.txt"
  local status=${PIPESTATUS[0]}
  if [ "$status" -ne 0 ]; then
    echo "{\"part\": \"$name\", \"name\": \"ended with $status\", \"value\": null, \"unit\": \"\", \"note\": \"see its log\"}" >>"$OUT/rows.jsonl"
  fi
}

tests() { "$python" -m pytest -q -p no:cacheprovider --durations=5 "$@"; }
export -f tests
export python

if [ -z "$tiny" ]; then
  export REQUIRE_GPU=1
  nvidia-smi --query-gpu=name,memory.total,clocks.max.sm,driver_version --format=csv,noheader
fi
"$python" "$here/rows.py" --machine
part 60 nccl "$python" "$here/nccl_api.py" $tiny
part 90 kernels "$python" "$here/kernel_rates.py" $tiny
[ -n "$tiny" ] || part 90 "step tests" bash -c 'tests -n 4 tests/gpu/test_matmul.py tests/gpu/test_step.py'
part 185 steps "$python" "$here/steps.py" $tiny --seconds 140
if [ -z "$tiny" ]; then
  part 80 "run tests" bash -c 'tests -n 6 tests/gpu/test_run.py'
  part 50 "offload tests" bash -c 'tests tests/gpu/test_activation_offload.py'
  # The allocator near its limit without expandable segments, which are the default.
  PYTORCH_ALLOC_CONF=expandable_segments:False part 35 segments "$python" "$here/steps.py" --only "0 of 8.*selective" --part segments
fi
"$python" "$here/rows.py" "$OUT/rows.jsonl" >"$OUT/table.md"
echo && echo "=== the table is $OUT/table.md (at ${SECONDS} s)"
