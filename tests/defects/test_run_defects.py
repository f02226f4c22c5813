"""Regression tests of defects of the 2021 runs, data and commands. README.md lists all."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.common.data_files import write_mnist
from tests.common.small_runs import TINY, Outcome, metrics, vil
from vil.config import dump, get_config
from vil.config.load import diff

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def train(folder: str, *words: str) -> Outcome:
    return vil("train", *TINY, "OPTIM.EPOCHS=1", "--output_dir", folder, *words)


def fresh_python(code: str) -> str:
    """The output of the code in a new process, which must print nothing to stderr."""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100,
        env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


@pytest.mark.defect("B1")
def test_importing_the_commands_does_nothing():
    """B1. Importing the 2021 code parsed arguments, read data and queried CUDA."""
    code = (
        "import logging, sys, vil.cli.train, vil.cli.evaluate, tools.train\n"
        "print('torch' in sys.modules, logging.getLogger().handlers)"
    )
    assert fresh_python(code) == "False []\n"
    assert list(Path().iterdir()) == []


@pytest.mark.defect("B10")
def test_a_saved_config_is_its_own_copy():
    """B10. The original could not read the config.yaml that it had written."""
    assert train("run", "AUG.SCALE=(0.5, 1)", "DATALOADER.RE=no").code == 0
    assert train("again", "--config-file", "run/config.yaml", "OPTIM.LR=0.02").code == 0
    found = get_config("again/config.yaml")
    assert diff(found, get_config("run/config.yaml")).keys() == {"OPTIM.LR", "OUTPUT_DIR"}
    assert dump(found) == Path("again/config.yaml").read_text()


@pytest.mark.defect("B26")
@pytest.mark.long
def test_nothing_deprecated_is_imported_or_called():
    """B26. Dependencies are imported first, so that all further warnings are the package's."""
    code = """
import os, pkgutil, sys, warnings
os.environ["VIL_NATIVE"] = "0"  # there is no PATH to a compiler
import timm, torch, torchvision, yacs.config
import torch.utils.tensorboard, timm.data, timm.optim, timm.data.mixup, torchvision.transforms.v2
warnings.simplefilter("error", DeprecationWarning)
warnings.simplefilter("error", FutureWarning)
import vil
found = [module.name for module in pkgutil.walk_packages(vil.__path__, "vil.")]
for name in found:
    if name != "vil.__main__":
        __import__(name)
model = vil.get_model("vil_tiny_rpb", img_size=32, num_classes=3, drop_path_rate=0.1)
repr(model)
with torch.autocast("cpu", torch.bfloat16):
    model(torch.randn(2, 3, 32, 32)).sum().backward()
print(len(found) > 60, "timm.models.layers" in sys.modules)
"""
    assert fresh_python(code) == "True False\n"


@pytest.mark.defect("B27")
def test_images_with_one_channel_can_be_trained():
    """B27. MNIST could be loaded, but the model rejected its images."""
    write_mnist(Path("data"))
    mnist = ("DATA.TRAIN=[mnist]", "DATA.TEST=[mnist]", "DATA.NUM_CLASSES=10", "DATA.PATH=data")
    assert train("run", *mnist, "DATALOADER.BSZ=8", "DATA.KWARGS={}").code == 0
    assert metrics("run", "val/mnist")[0]["count"] == 12


@pytest.mark.defect("B28")
def test_an_odd_batch_is_mixed():
    """B28. The original's mixup refused it."""
    words = ("DATALOADER.BSZ=5", "DATA.KWARGS.n=15", "AUG.MIXUP_PROB=1", "AUG.MIXUP=0.8")
    assert train("run", *words).code == 0
    assert len(metrics("run", "train")) == 3


@pytest.mark.defect("B29")
@pytest.mark.parametrize("name", ["multisoftmax", "mse"])
def test_a_loss_of_several_labels_is_refused_by_name(name):
    """B29. The 2021 config accepted them, and the loop ended with a traceback."""
    ended = train("run", f"LOSS.LOSS={name}")
    assert ended.code == 2
    assert f"{name} is not a loss of single-label classification" in ended.err
    assert not Path("run").exists()


@pytest.mark.defect("B32")
def test_the_cuda_kernel_by_its_old_name():
    """B32. It failed with an obscure error. On a CPU it is now rejected in one line."""
    ended = train("run", "MODEL.VIT.MSVIT.ATTN_TYPE=longformer_cuda")
    assert ended.code == 2
    assert "triton" in ended.err
    assert ended.err.count("\n") == 1
    assert not Path("run").exists()
