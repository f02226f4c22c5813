#!/usr/bin/env bash
# From a fresh clone to a trained and evaluated Vision Longformer on two CPU cores: create .venv, install, train on
# the scanned digits of scikit-learn, and evaluate the last checkpoint in a second process.
#   ./scripts/quickstart.sh            PYTHON=python3.12 ./scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."

run=runs/quickstart
if [ ! -x .venv/bin/vil ]; then
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
fi
.venv/bin/vil train --config-file digits/vil_nano.yaml --output_dir "$run" --resume
echo
echo "Evaluate the last checkpoint in a new process (the best checkpoint was selected on these images):"
.venv/bin/vil evaluate --run "$run" --checkpoint last
echo
echo "Curves:      $PWD/$run/plots/*.png   (or: .venv/bin/tensorboard --logdir $run/tb)"
echo "Checkpoints: $PWD/$run/checkpoints"
