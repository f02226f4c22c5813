"""The packages of the wheel: vil, and configs/ as vil.configs. Metadata is in pyproject.toml.

The wheel includes the compiled native library if there is a C++ compiler. Without it, the library
is compiled at first use.

`pip install -e` adds this folder to Python's path instead. Then Python finds the package from every
folder, including the one that contains a checkout named vil.
"""

import importlib.util
import platform
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
FOLDERS = [path for path in sorted((ROOT / "configs").rglob("*")) if path.is_dir()]
CONFIGS = ["vil.configs"] + [
    ".".join(["vil.configs", *path.relative_to(ROOT / "configs").parts]) for path in FOLDERS
]

EDITABLE = "editable_wheel" in sys.argv
NATIVE = "vil/ops/native"
TEMPLATES = ["report/*.j2", "tasks/*.j2", "tasks/*/*.j2", "workflows/*.j2"]


class BuildPackages(build_py):
    """Copy the packages, and compile the native library. A failed compilation is reported only."""

    def run(self):
        super().run()
        if self.editable_mode or (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        # by its path, because the package needs torch
        spec = importlib.util.spec_from_file_location("build", ROOT / NATIVE / "build.py")
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        for problem in build.build_all(Path(self.build_lib, NATIVE, build.BUILT.name)):
            print(f"native library without {problem}", file=sys.stderr)


class BuildWheel(bdist_wheel):
    """Build a wheel for this platform and any Python if it has the native library."""

    def get_tag(self):
        if not any(Path(self.bdist_dir, NATIVE).glob("*/*.so")):
            return super().get_tag()
        self.root_is_pure = False
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_py": BuildPackages, "bdist_wheel": BuildWheel},
    packages=find_packages(include=["vil", "vil.*"]) + ([] if EDITABLE else CONFIGS),
    package_dir={"": "."} if EDITABLE else {"vil.configs": "configs"},
    package_data={name: ["*.yaml"] for name in CONFIGS}
    | {"vil": ["weights/*", "pretrained/*.csv", *TEMPLATES]}
    | {"vil.ops.native": ["*.h", "*.cpp"]},
)
