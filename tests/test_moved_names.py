"""Names of the previous version still work, and warn with the new place."""

import importlib
import subprocess
import sys
import warnings

import pytest

import vil
from vil.utils.moved import MODULES, NAMES

DOCUMENTED = [  # in README.md and docs of the previous version, and in its issues' examples
    ("vil.models.msvit", "MsViT", "vil.models.vision_longformer"),
    ("vil.models.export", "export_model", "vil.export"),
    ("vil.models.exported", "load_exported", "vil.export"),
    ("vil.models.exported", "quantize_linears", "vil.export"),
    ("vil.models.original", "original_names", "vil.pretrained.convert_2021.get_2021_names"),
    ("vil.models.zoo", "get_model", "vil.pretrained.get_model.get_model"),
    ("vil.build", "build_model", "vil.workflows.build_model"),
    ("vil.utils.progress", "Progress", "vil.utils.train_step.TrainStep"),
    ("vil.detection.models", "build_detector", "vil.tasks.detection.models.detectors"),
    ("vil.ops", "autotune", "vil.ops.tuning.tuner"),
    ("vil.ops", "choices", "vil.ops.tuning.tuning_cache"),
]
UNCHANGED = [
    ("vil.models.arch", "parse_arch"),
    ("vil.models.attention_maps", "attention_maps"),
    ("vil.build", "build_model"),
    ("vil.layers.attention", "set_progress"),
]


def forget(name):
    """Let the next import of an old module be its first."""
    for module in [module for module in sys.modules if f"{module}.".startswith(f"{name}.")]:
        if module in MODULES:
            del sys.modules[module]
            parent, _, leaf = module.rpartition(".")
            vars(sys.modules.get(parent, vil)).pop(leaf, None)


@pytest.mark.parametrize("old", MODULES)
def test_every_target_exists(old):
    forget(old)
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated, use {MODULES[old]}"):
        module = importlib.import_module(old)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in NAMES.get(old, {}):
            assert callable(getattr(module, name)) or isinstance(getattr(module, name), int)
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_names_belong_to_moved_modules():
    assert NAMES.keys() <= MODULES.keys()
    assert not set(MODULES.values()) & MODULES.keys(), "targets must be the newest names"


@pytest.mark.parametrize(("module", "name", "new"), DOCUMENTED)
def test_documented_imports_work_and_name_the_new_place(module, name, new):
    forget(module)
    forget(f"{module}.{name}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(f"from {module} import {name}", "user.py", "exec"), {})
    found = [(each.filename, str(each.message)) for each in caught if "vil." in str(each.message)]
    assert found[-1][0] == "user.py"
    assert found[-1][1].startswith(module)
    assert found[-1][1].endswith(f"use {new}")


@pytest.mark.parametrize(("module", "name"), UNCHANGED)
def test_documented_imports_that_did_not_move(module, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert callable(getattr(importlib.import_module(module), name))


def test_an_old_import_registers_with_timm():
    code = "import timm, vil.models.timm_models; assert timm.is_model('vil_tiny')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_classes_are_the_same_objects():
    forget("vil.models.msvit")
    with pytest.warns(DeprecationWarning, match="vision_longformer"):
        from vil.models.msvit import MsViT
    from vil.models.vision_longformer import MsViT as New

    assert MsViT is New
