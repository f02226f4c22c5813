#!/usr/bin/env bash
# Train a detector on COCO on the GPUs of one machine, with the 1x schedule (12 epochs, 16 images per step).
#   scripts/coco_1x.sh MODEL WEIGHTS DATA [--FLAG ...] [KEY VALUE ...]
#   scripts/coco_1x.sh mask_rcnn_vil_tiny model_best.pth /data/coco
#   NPROC=4 OUT=runs/tiny scripts/coco_1x.sh retinanet_vil_small model_best.pth /data/coco OPTIM.LR 5e-5
# MODEL: mask_rcnn_ or retinanet_, then vil_tiny, vil_small, vil_medium_deep or vil_base_deep (configs/coco).
# WEIGHTS: weights of a classifier, for the backbone. DATA contains train2017/, val2017/ and annotations/.
# NPROC: number of processes (8). Scale the learning rate with the batch size: for DATALOADER.BSZ 8 instead
# of 16, halve OPTIM.LR (1e-4).
set -euo pipefail
schedule=${SCHEDULE:-1x}   # coco_3x.sh sets it
here=$(dirname "${BASH_SOURCE[0]}")
if [[ $# -lt 3 || ! -e $2 || ! -d $3 || ! -e $here/../configs/coco/$1_$schedule.yaml ]]; then
    sed -n '/^set/q; 2,$ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    if [ $# -ge 3 ]; then echo "no config coco/$1_$schedule.yaml, no weights at '$2', or no data folder at '$3'" >&2; fi
    exit 2
fi
model=$1 weights=$2 data=$3
shift 3
exec "$here/train_8gpu.sh" "coco/${model}_$schedule.yaml" "$data" MODEL.MODEL_PATH "$weights" "$@"
