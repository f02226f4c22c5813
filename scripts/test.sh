#!/usr/bin/env bash
# The test suite, from a fresh clone too: makes .venv and installs what is missing. Arguments go to pytest.
# Two processes; who is done first takes over from the other.   ./scripts/test.sh            ./scripts/test.sh tests/ops -m slow
set -euo pipefail
cd "$(dirname "$0")/.."

if ! .venv/bin/python -c "import vil, pytest, hypothesis, xdist, sklearn, setuptools, segmentation_models_pytorch, onnxruntime, onnxscript, pycocotools, faster_coco_eval, mkdocs, datasets, nbclient, ipykernel, tifffile, zarr" 2>/dev/null; then
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
fi
.venv/bin/ruff check .
.venv/bin/python -m pytest -n 2 --dist worksteal "$@"
