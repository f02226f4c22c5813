"""The packages of the wheel: vil, and configs/ as vil.configs. Metadata is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FOLDERS = [path for path in sorted((ROOT / "configs").rglob("*")) if path.is_dir()]
CONFIGS = ["vil.configs"] + [
    ".".join(["vil.configs", *path.relative_to(ROOT / "configs").parts]) for path in FOLDERS
]

setup(
    packages=find_packages(include=["vil", "vil.*"]) + CONFIGS,
    package_dir={"vil.configs": "configs"},
    package_data={name: ["*.yaml"] for name in CONFIGS}
    | {"vil": ["weights/*", "pretrained/*.csv", "report/*.j2", "tasks/*.j2", "tasks/*/*.j2"]}
    | {"vil.ops.native": ["*.h", "*.cpp"]},
)
