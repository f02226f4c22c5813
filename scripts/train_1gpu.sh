#!/usr/bin/env bash
# Train on one GPU, or on the CPU where there is none: train_8gpu.sh with one process.
#   scripts/train_1gpu.sh imagenet/vil_tiny_rpb.yaml /data/imagenet DATALOADER.BSZ 128 OPTIM.ACCUMULATE 8
#   CONFIG=mine.yaml DATA=/data/flowers OUT=runs/flowers scripts/train_1gpu.sh --resume
# A recipe's batch is meant for several GPUs; the first line adds its 1024 images up from 8 batches.
set -euo pipefail
NPROC=${NPROC:-1} exec "$(dirname "${BASH_SOURCE[0]}")/train_8gpu.sh" "$@"
