#!/usr/bin/env bash
# Train under SLURM, on one node or several. Two minutes before its time limit, or when it is preempted, the job saves
# a checkpoint and requeues itself. After the restart, it resumes from that checkpoint.
#   sbatch scripts/train_slurm.sh --config-file imagenet/vil_small_rpb.yaml --data /data/imagenet --output_dir runs/small
#   sbatch --nodes=4 --gres=gpu:8 --cpus-per-task=64 --time=12:00:00 scripts/train_slurm.sh ...
# Environment variables: NPROC, the processes per node (default: its GPUs, or 1), and MASTER_PORT (29500).
#SBATCH --job-name=vil
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

folder="" previous=""
for word in "$@"; do
    if [[ $previous =~ ^--output([_-]dir)?$ ]]; then folder=$word; fi
    if [[ $word =~ ^--output([_-]dir)?=(.*)$ ]]; then folder=${BASH_REMATCH[2]}; fi
    previous=$word
done
if [ -z "${SLURM_JOB_ID:-}" ] || [ -z "$folder" ]; then
    sed -n '/^#SBATCH/q; 2,$ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    echo "submit this script with sbatch, and set --output_dir" >&2
    exit 2
fi
root=${VIL_ROOT:-$SLURM_SUBMIT_DIR}
command -v vil >/dev/null || PATH="$root/.venv/bin:$PATH"
started=$(mktemp)
trap 'rm -f "$started"' EXIT
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="${NPROC:-${SLURM_GPUS_ON_NODE:-1}}" \
    --rdzv_backend=c10d --rdzv_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv_endpoint="$first:${MASTER_PORT:-29500}" \
    -m vil train --resume "$@" &
step=$!
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1 TERM   # srun would kill the processes at once
code=0
while kill -0 $step 2>/dev/null; do   # a signal interrupts wait, not the step
    wait $step && code=0 || code=$?
done

# torchrun exits with 1 for every failure; the exit code of the run is in status.json, if this job wrote one
if [ "$folder/status.json" -nt "$started" ] && grep -q '"code": 75' "$folder/status.json" 2>/dev/null; then
    echo "checkpoint saved; requeuing the job"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
