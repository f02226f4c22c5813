#!/usr/bin/env bash
# Run the test suite, also from a fresh clone: create .venv and install missing packages. Arguments are passed to pytest.
# Two processes share the tests.   ./scripts/test.sh            ./scripts/test.sh tests/ops -m slow
set -euo pipefail
cd "$(dirname "$0")/.."

packages="vil pytest hypothesis xdist sklearn segmentation_models_pytorch onnxruntime onnxscript pycocotools faster_coco_eval mkdocs datasets nbclient ipykernel tifffile zarr torchmetrics mpl_toolkits.basemap_data wandb mlflow"
if ! .venv/bin/python -c "import sys; from importlib.util import find_spec; assert all(map(find_spec, sys.argv[1:]))" $packages 2>/dev/null; then
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
fi
unset PYTHONDONTWRITEBYTECODE # tests start many processes, which would compile the package again
.venv/bin/ruff check .
.venv/bin/python -m pytest -n 2 --dist worksteal "$@"
