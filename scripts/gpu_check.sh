#!/usr/bin/env bash
# Test and measure on this machine's GPU, without network. No step can stop a later one.
#
#   scripts/gpu_check.sh --out FOLDER [--budget SECONDS] [--steps "NAME ..."] [--only PATTERN]
#                        [--wheels FOLDER] [--dry]
#
#   right    the Triton tests, a model against the CPU in float64, synchronizations of a training
#   table    attention against dense, Flex and 2021 attention, and models against timm's
#   tuned    block sizes of the kernels, the profile of a training step, counters of the kernels
#   trained  training from JPEG files, stopping and resuming, digits and a detector
#   all      all of them, the default. Or single steps: see the end of this file. Steps joined by +
#            run at the same time.
#
# FOLDER gets few files: log.txt, rows.jsonl with a line per number, and results.tgz with the output
# of each step, tests, traces and curves, packed after each step. --budget (default 840) limits all steps
# together; each step also has a limit of its own. --wheels installs packages that the machine lacks,
# from files: pip download --no-deps -d wheels yacs rich markdown-it-py mdurl pygments
# --only measures the models that match a regular expression.
# The steps `right` (but for syncs), `table` and `tuned` need torch, torchvision, triton, timm, numpy,
# pytest and yacs only. --dry runs tiny versions on a CPU, to test this script.
set -uo pipefail # no -e: a failed step must not stop the next one
set -m           # or steps in the background would ignore SIGINT
cd "$(dirname "$0")/.."

out='' budget=840 steps=all wheels='' only='' dry='' threads=2
while [ $# -gt 0 ]; do
    case $1 in
    --out) out=$2 && shift ;;
    --budget) budget=$2 && shift ;;
    --steps) steps=$2 && shift ;;
    --wheels) wheels=$2 && shift ;;
    --only) only=$2 && shift ;;
    --dry) dry=--dry threads=1 ;;
    *) echo "unknown argument $1: see the head of $0" >&2 && exit 2 ;;
    esac
    shift
done
[ -n "$out" ] || { echo "give a folder for the results: $0 --out FOLDER" >&2 && exit 2; }
work=$(mktemp -d)
keep=$work/keep # what results.tgz holds
mkdir -p "$out" "$keep" "$work/tmp"
python=.venv/bin/python
[ -x "$python" ] || python=python3
export TMPDIR=$work/tmp
export PYTHONPATH=$work/site:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 VIL_CACHE=$work/vil TRITON_CACHE_DIR=$work/triton
export TORCHINDUCTOR_CACHE_DIR=$work/inductor CUDA_MODULE_LOADING=LAZY TORCHINDUCTOR_COMPILE_THREADS=4 OMP_NUM_THREADS=$threads
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

say() { echo "## $*" | tee -a "$out/log.txt"; }

step() { # step NAME LIMIT COMMAND...: run under a time limit, inside the budget
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    [ -n "$dry" ] && limit=$((4 * limit)) # of a CPU that others use too
    [ $((budget - SECONDS)) -lt "$limit" ] && limit=$((budget - SECONDS))
    [ "$limit" -lt 5 ] && say "$name: no time left" && return
    say "$name: at most $limit s"
    # SIGINT: pytest then reports what has failed so far
    timeout -s INT -k 8 "$limit" "$@" >"$keep/$name.txt" 2>&1
    code=$?
    cp "$keep/rows.jsonl" "$out/rows.jsonl" 2>/dev/null
    tail -n 40 "$keep/$name.txt" | sed "s/^/$name| /" >>"$out/log.txt"
    say "$name: exit code $code after $((SECONDS - start)) s"
    tar czf "$work/$name.tgz" -C "$work" keep 2>/dev/null # 1: another step wrote to a file
    [ $? -le 1 ] && mv "$work/$name.tgz" "$out/results.tgz"
}

together() { # together STEP...: of which none is timed
    for each in "$@"; do run "$each" & done
    wait
}

measure() { # measure LIMIT PART: a part of benchmarks/gpu.py
    step "$2" "$1" "$python" benchmarks/gpu.py "$2" --out "$keep" ${only:+--only "$only"} $dry
}

gpu_tests() { # gpu_tests NAME LIMIT FILE...: in parallel if pytest-xdist is there
    local name=$1 limit=$2 parallel=''
    shift 2
    "$python" -c 'import xdist' 2>/dev/null && parallel="-n $(nproc) --dist worksteal"
    [ -n "$dry" ] && parallel='--collect-only -qq'
    step "$name" "$limit" "$python" -m pytest -m gpu $parallel -p no:cacheprovider --maxfail 100 \
        --tb short -v --junitxml "$keep/$name.xml" "$@"
}

counters() { # hardware counters of the kernels, where Nsight Compute is installed
    command -v ncu >/dev/null || return 0
    step counters 60 ncu --clock-control none --set detailed -k 'regex:(forward|query|key|tile)_kernel' \
        -c 8 --csv --page raw --log-file "$keep/counters.csv" "$python" benchmarks/gpu.py profile --out "$work/ncu"
}

run() {
    case $1 in
    all) for each in right table tuned trained; do run $each; done ;;
    right) run machine && together tests reads syncs messages && together exact compile ;;
    table) for each in machine attention models flex; do run $each; done ;;
    tuned) for each in machine profile host sweep counters; do run $each; done ;;
    trained) for each in machine train resume recipes; do run $each; done ;;
    tests) gpu_tests tests 260 tests/ops/test_triton.py tests/ops/test_attention_on_gpu.py \
        tests/data/test_pixels.py ;;
    alltests) gpu_tests alltests 400 tests ;;
    reads) gpu_tests reads 100 tests/engine/test_blocking_reads.py ;;
    machine) measure 60 machine ;;
    exact) measure 200 exact ;;
    syncs) measure 200 syncs ;;
    messages) measure 100 messages ;;
    compile) measure 240 compile ;;
    attention) measure 150 attention ;;
    flex) measure 120 flex ;;
    models) measure 200 models ;;
    profile) measure 90 profile ;;
    host) measure 30 host ;;
    sweep) measure 240 sweep ;;
    counters) counters ;;
    train) measure 200 train ;;
    resume) measure 100 resume ;;
    recipes) measure 300 recipes ;;
    *+*) together ${1//+/ } ;;
    *) say "unknown step $1" ;;
    esac
}

[ -z "$wheels" ] || step wheels 60 "$python" -m pip install -q --no-index --no-deps --target "$work/site" "$wheels"/*.whl
step versions 60 bash -c "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv; $python -m pip list; true"
for each in $steps; do run "$each"; done
say "all after $SECONDS s: $(wc -l <"$out/rows.jsonl" 2>/dev/null || echo 0) rows in $out"
