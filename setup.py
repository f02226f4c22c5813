"""Package metadata. `pip install .` installs the library, the `vil` command and the configs (as
`vil.configs`).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (HERE / "vil/__init__.py").read_text()).group(1)
FOLDERS = [path for path in sorted((HERE / "configs").rglob("*")) if path.is_dir()]
CONFIGS = ["vil.configs"] + [
    ".".join(["vil.configs", *path.relative_to(HERE / "configs").parts]) for path in FOLDERS
]
EXPORT = ["onnx>=1.16", "onnxscript>=0.2", "onnxruntime>=1.18"]
DETECTION = ["faster-coco-eval>=1.6"]
EXTRAS = {
    "demo": ["scikit-learn>=1.3"],
    "detection": DETECTION,
    "export": EXPORT,
    "dev": [
        "pytest>=8",
        "pytest-xdist>=3.5",
        "ruff>=0.6",
        "hypothesis>=6.100",
        "setuptools>=70.1",  # the wheel test builds without isolation
        "scikit-learn>=1.3",
        "segmentation-models-pytorch>=0.5",  # somebody else's user of timm's models
        "pycocotools>=2.0.7",  # what average precision and masks are held to
        *DETECTION,
        *EXPORT,
    ],
}

setup(
    name="vil",
    version=VERSION,
    description="Train vision transformers with local 2-D attention (Vision Longformer)",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["vil", "vil.*"]) + CONFIGS,
    package_dir={"vil.configs": "configs"},
    package_data={name: ["*.yaml"] for name in CONFIGS}
    | {"vil": ["weights/*", "pretrained/*.csv", "report/*.j2", "tasks/*/*.j2"]},
    install_requires=[
        "torch>=2.6",
        "torchvision>=0.21",
        "timm>=1.0.20,<2",
        "yacs>=0.1.8",
        "pyyaml>=6",
        "numpy>=1.26",
        "pillow>=10",
        "safetensors>=0.4.3",
        "tensorboard>=2.14",
        "matplotlib>=3.8",
        "jinja2>=3.1",
        "rich>=13",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["vil = vil.cli:main"]},
)
