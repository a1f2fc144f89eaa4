#!/usr/bin/env bash
# Steps of Llama 3.1 8B on two nodes of 8 GPUs, under SLURM: what the network between nodes takes. Submit it in the repository's
# root with the site's partition and account:
#
#   sbatch --partition=P --account=A scripts/gpu/two_nodes.sh         rows in gpu_two_nodes/rows.jsonl, their table in table.md
#
# Not run on a GPU.
#SBATCH --job-name=meshwright-two-nodes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=64
#SBATCH --time=00:20:00
set -uo pipefail
export OUT=$PWD/gpu_two_nodes PYTHONPATH=$PWD:$PWD/.site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 NCCL_DEBUG=INFO
python=${PYTHON:-python3}
mkdir -p "$OUT"
rm -f "$OUT/rows.jsonl"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task=64 "$python" -m torch.distributed.run --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d \
  --rdzv-endpoint="$first:29400" --rdzv-id="$SLURM_JOB_ID" scripts/gpu/steps.py --seconds 700 2>&1 | tee "$OUT/steps.txt"
"$python" scripts/gpu/rows.py "$OUT/rows.jsonl" | tee "$OUT/table.md"
