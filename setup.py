"""The packages of the wheel: vil, and configs/ as vil.configs. Metadata is in pyproject.toml.

`pip install -e` adds this folder to Python's path instead. Then Python finds the package from every
folder, including the one that contains a checkout named vil.
"""

import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FOLDERS = [path for path in sorted((ROOT / "configs").rglob("*")) if path.is_dir()]
CONFIGS = ["vil.configs"] + [
    ".".join(["vil.configs", *path.relative_to(ROOT / "configs").parts]) for path in FOLDERS
]

EDITABLE = "editable_wheel" in sys.argv

setup(
    packages=find_packages(include=["vil", "vil.*"]) + ([] if EDITABLE else CONFIGS),
    package_dir={"": "."} if EDITABLE else {"vil.configs": "configs"},
    package_data={name: ["*.yaml"] for name in CONFIGS}
    | {"vil": ["weights/*", "pretrained/*.csv", "report/*.j2", "tasks/*.j2", "tasks/*/*.j2"]}
    | {"vil.ops.native": ["*.h", "*.cpp"]},
)
