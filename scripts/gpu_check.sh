#!/usr/bin/env bash
# Run the GPU tests and the attention benchmarks on this machine's GPU, without network.
# Writes to benchmarks/results/<gpu>-<date>/:
#   tests.txt                the gpu tests
#   registers.txt            registers of the kernels, as the driver reports them and as compiled ahead of time
#   engine.json              the speed ratios that the docs claim
#   masks/, modes/, model/   results and plots of every backend
#   layouts.json             times of attention patterns, compared with SDPA with a mask
#   tune.txt, cache/         the choices of the tuner
#   preference.txt           the ranking of the backends
# It should take less than ten minutes, but has not been timed on a GPU yet.
#   ./scripts/gpu_check.sh            QUICK=1 ./scripts/gpu_check.sh   (fewer repeats)
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"'

name=$("$python" -c 'import torch; from vil.utils.machine import slug; print(slug(torch.cuda.get_device_name()))')
out="benchmarks/results/$name-$(date +%Y-%m-%d)"
mkdir -p "$out"
rounds=$([ -n "${QUICK:-}" ] && echo 9 || echo 25)
shape="--device cuda --dtype bfloat16 --batch 8 --heads 6 --head-dim 64 --window 8 --grids 14,28,56,112 --rounds $rounds"
"$python" -m pytest -m gpu -p no:cacheprovider 2>&1 | tee "$out/tests.txt"
"$python" benchmarks/kernels.py --device --head-dims 32,64,128 --dtypes bfloat16 2>&1 | tee "$out/registers.txt"
"$python" benchmarks/attention_engine.py H --rounds "$rounds" --json "$out/engine.json"
"$python" -m vil benchmark attention $shape --masks chunks,exact,cyclic --out "$out/masks"
"$python" -m vil benchmark attention $shape --modes 0,1 --out "$out/modes"
"$python" benchmarks/layout_backends.py --device cuda --dtype bfloat16 --batch 8 --grids 28 56 --rounds "$rounds" --json "$out/layouts.json"
"$python" -m vil benchmark model --rounds "$rounds" --out "$out/model" --profile DEVICE cuda DATALOADER.BSZ 128
VIL_CACHE="$out/cache" "$python" -m vil tune --config-file imagenet/vil_small_rpb.yaml DEVICE cuda DATALOADER.BSZ 128 AMP.ENABLED True \
  2>&1 | tee "$out/tune.txt"
"$python" benchmarks/preference.py "$out/masks/attention.json" "$out/modes/attention.json" | tee "$out/preference.txt"
echo "$out"
