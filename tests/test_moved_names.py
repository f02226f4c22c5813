"""Python names in the docs of the previous version still work, and warn with the new place."""

import importlib
import subprocess
import sys
import warnings

import pytest

from tests.common.marks import cases
from vil.utils.moved import MODULES

DOCUMENTED = [  # old module, name in it, and the new place that the last warning gives
    ("vil.build", "build_model", "vil.workflows.build_model"),
    ("vil.detection.models", "build_detector", "vil.tasks.detection.models.detectors"),
    ("vil.models.export", "export_model", "vil.export"),
    ("vil.models.exported", "load_exported", "vil.export"),
    ("vil.models.exported", "quantize_linears", "vil.export"),
    ("vil.models.msvit", "MsViT", "vil.models.vision_longformer"),
    ("vil.models.original", "original_names", "vil.pretrained.convert_2021.get_2021_names"),
    ("vil.models.timm_models", "MsViT", "vil.integrations.timm_register"),
    ("vil.models.zoo", "get_model", "vil.pretrained.get_model"),
    ("vil.ops.autotune", "tune", "vil.ops.tuning.tuner"),
    ("vil.ops.choices", "save", "vil.ops.tuning.tuning_cache"),
    ("vil.utils.progress", "Progress", "vil.utils.train_step.TrainStep"),
]
UNCHANGED = [
    ("vil", "build_model"),
    ("vil.models.arch", "parse_arch"),
    ("vil.models.attention_maps", "attention_maps"),
    ("vil.layers.attention", "set_progress"),
    ("vil.layers.attention", "TrainStep"),
]


def forget(module):
    """Let the next import of an old module be its first."""
    assert module in MODULES
    sys.modules.pop(module, None)
    parent, _, leaf = module.rpartition(".")
    vars(importlib.import_module(parent)).pop(leaf, None)


@pytest.mark.parametrize("row", cases(DOCUMENTED))
def test_old_names_work_and_warn_with_the_new_place(row):
    (module, name, new), scope = row, {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forget(module)
        exec(compile(f"from {module} import {name}", "user.py", "exec"), scope)
    messages = [
        (each.filename, str(each.message)) for each in caught if "vil." in str(each.message)
    ]
    assert messages[-1][0] == "user.py"
    assert messages[-1][1].startswith(module)
    assert messages[-1][1].endswith(f"use {new}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old = importlib.import_module(module)
        assert scope[name] is getattr(old, name)
        assert callable(scope[name])
        with pytest.raises(AttributeError, match="no_such_name"):
            old.no_such_name  # noqa: B018


@pytest.mark.parametrize(("module", "name"), UNCHANGED)
def test_documented_names_that_did_not_move(module, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.long
def test_an_old_submodule_can_be_imported_from_its_package():
    code = (
        "from vil import build; from vil.ops import autotune, choices\n"
        "import timm, vil.models.timm_models\n"
        "assert callable(build.build_model) and autotune.tune and choices.save\n"
        "assert timm.is_model('vil_tiny')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
