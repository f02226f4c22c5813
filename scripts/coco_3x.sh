#!/usr/bin/env bash
# Train a detector on COCO like coco_1x.sh, with the 3x schedule: 36 epochs, shorter sides of 640 to 800 pixels.
#   scripts/coco_3x.sh MODEL WEIGHTS DATA [--FLAG ...] [KEY VALUE ...]
SCHEDULE=3x exec "$(dirname "${BASH_SOURCE[0]}")/coco_1x.sh" "$@"
