"""Old names of modules that have moved. They still work in this version, but not in the next.

`install` appends a finder to sys.meta_path, which costs nothing until an old name is imported.
"""

import importlib
import sys
import warnings
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {  # old module -> new module
    "vil.build": "vil.workflows.build_model",
    "vil.detection": "vil.tasks.detection",
    "vil.detection.models": "vil.tasks.detection.models.detectors",
    "vil.models.export": "vil.export",
    "vil.models.exported": "vil.export",
    "vil.models.msvit": "vil.models.vision_longformer",
    "vil.models.original": "vil.pretrained.convert_2021",
    "vil.models.timm_models": "vil.integrations.timm_register",
    "vil.models.zoo": "vil.pretrained.get_model",
    "vil.ops.autotune": "vil.ops.tuning.tuner",
    "vil.ops.choices": "vil.ops.tuning.tuning_cache",
    "vil.utils.progress": "vil.utils.train_step",
}
RENAMED = {"original_names": "get_2021_names", "Progress": "TrainStep"}


class MovedModuleFinder(Loader):
    """A meta path finder and loader of deprecated modules, which forward to the new ones."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_package = name == "vil.detection"
        return ModuleSpec(name, self, is_package=is_package) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        """Make the deprecated `module` look up its attributes in the new module."""
        old, new = module.__name__, MODULES[module.__name__]
        warn(old, new)
        target = importlib.import_module(new)

        def __getattr__(name: str) -> Any:
            if name in RENAMED:
                warn(f"{old}.{name}", f"{new}.{RENAMED[name]}")
            return getattr(target, RENAMED.get(name, name))

        module.__getattr__ = __getattr__


def warn(old: str, new: str) -> None:
    """Issue a DeprecationWarning for the line of user code that uses the old name."""
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)


def install() -> None:
    """Make the deprecated module names importable."""
    sys.meta_path.append(MovedModuleFinder())
