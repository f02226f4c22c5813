#!/usr/bin/env bash
# Train on the GPUs of one machine, with one process per GPU. Without GPUs, the processes share the CPU.
#   scripts/train_8gpu.sh [CONFIG [DATA]] [--FLAG ...] [KEY VALUE ...]
#   scripts/train_8gpu.sh imagenet/vil_small_rpb.yaml /data/imagenet OPTIM.LR 8e-4
#   NPROC=4 CONFIG=mine.yaml DATA=/data/flowers OUT=runs/flowers scripts/train_8gpu.sh --resume
# Environment variables and their defaults: CONFIG (imagenet/vil_tiny_rpb.yaml) and DATA (no default), for
# omitted arguments; OUT, the run folder (runs/<name of the config>); NPROC, the number of processes (8).
# DATALOADER.BSZ is the number of images of all processes. train_1gpu.sh is the same with NPROC 1.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

is_plain() { [[ $# -gt 0 && (-d $1 || ! $1 =~ ^(-|.*=|[A-Z_]+(\.[A-Z_0-9]+)*$)) ]]; }   # neither a flag nor a key
config=${CONFIG:-imagenet/vil_tiny_rpb.yaml} data=${DATA:-}
if is_plain "$@"; then config=$1; shift; fi
if is_plain "$@"; then data=$1; shift; fi
if [ ! -d "$data" ]; then
    sed -n '/^set/q; 2,$ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    echo "no data folder at '$data'" >&2
    exit 2
fi
# Prefer an active environment with vil to the repository's .venv.
command -v vil >/dev/null || PATH="$root/.venv/bin:$PATH"
set -- --config-file "$config" --data "$data" --output_dir "${OUT:-runs/$(basename "${config%.*}")}" "$@"
if [ "${NPROC:-8}" = 1 ]; then
    exec vil train "$@"
fi
exec torchrun --standalone --nproc_per_node="${NPROC:-8}" "$root/tools/train.py" "$@"
