#!/usr/bin/env bash
# Train on one GPU, or on the CPU if there is no GPU: train_8gpu.sh with one process.
#   scripts/train_1gpu.sh imagenet/vil_tiny_rpb.yaml /data/imagenet DATALOADER.BSZ 128 OPTIM.ACCUMULATE 8
#   CONFIG=mine.yaml DATA=/data/flowers OUT=runs/flowers scripts/train_1gpu.sh --resume
# The batch sizes of the recipes are for several GPUs. The first command accumulates 8 batches to 1024 images.
set -euo pipefail
NPROC=${NPROC:-1} exec "$(dirname "${BASH_SOURCE[0]}")/train_8gpu.sh" "$@"
