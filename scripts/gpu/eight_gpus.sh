#!/usr/bin/env bash
# What a node of several GPUs tells, in some 15 minutes: layouts equal stock transformers over NCCL, and steps of Llama 3.1 8B.
#
#   OUT=/tmp/gpu bash scripts/gpu/eight_gpus.sh [number of GPUs]     rows in $OUT/rows.jsonl, their table in $OUT/table.md
#
# NCCL_DEBUG=INFO in $OUT/steps.txt shows which links it takes. Not run on a GPU.
set -uo pipefail
gpus=${1:-8}
export OUT=${OUT:-/tmp/gpu} PYTHONPATH=$PWD:$PWD/.site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 REQUIRE_GPU=1 TOKENIZERS_PARALLELISM=false
python=${PYTHON:-python3}
mkdir -p "$OUT"
rm -f "$OUT/rows.jsonl"
nvidia-smi topo -m | tee "$OUT/links.txt"
"$python" -m framework.cli doctor | tee "$OUT/doctor.txt"
"$python" -m pytest -q -p no:cacheprovider tests/gpu 2>&1 | tee "$OUT/tests.txt"
for layout in zero.stage=3 parallel.tp=2 parallel.pp=2 parallel.cp=2 "parallel.tp=2 parallel.pp=2"; do
  # shellcheck disable=SC2086 # overrides are words
  "$python" -m framework.cli verify experiment=quickstart $layout --device cuda --ranks "$gpus" 2>&1 | tee -a "$OUT/verify.txt"
done
NCCL_DEBUG=INFO "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" scripts/gpu/steps.py --seconds 400 \
  2>&1 | tee "$OUT/steps.txt"
"$python" scripts/gpu/rows.py "$OUT/rows.jsonl" | tee "$OUT/table.md"
