#!/usr/bin/env bash
# Fine-tune pretrained weights, such as those of ImageNet-22K, with one of the 384-px configs.
#   scripts/finetune_384.sh CONFIG WEIGHTS DATA OUT [--FLAG ...] [KEY VALUE ...]
#   seq 0 999 > rows.txt
#   scripts/finetune_384.sh imagenet/vil_medium_deep_384.yaml deepmedium/model_best.pth /data/imagenet \
#       runs/medium_384 FINETUNE.HEAD rows:rows.txt
# WEIGHTS: a file, or a run folder, of which the best checkpoint is used. NPROC: number of processes (8).
set -euo pipefail
if [[ $# -lt 4 || ! -e $2 || ! -d $3 ]]; then
    sed -n '/^set/q; 2,$ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    if [ $# -ge 4 ]; then echo "no weights at '$2', or no data folder at '$3'" >&2; fi
    exit 2
fi
config=$1 weights=$2 data=$3 out=$4
shift 4
OUT=$out exec "$(dirname "${BASH_SOURCE[0]}")/train_8gpu.sh" "$config" "$data" MODEL.MODEL_PATH "$weights" "$@"
