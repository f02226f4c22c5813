"""Regression tests of defects of the 2021 runs, data and commands. README.md lists all."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vil.cli import main
from vil.config import dump, get_config
from vil.config.load import diff

ROOT = Path(__file__).parents[2]
TINY = (
    "INPUT.IMAGE_SIZE=32", "DATALOADER.BSZ=16", "LOG_FREQ=1", "OPTIM.OPT=sgd", "OPTIM.LR=0.01",
    "OPTIM.EPOCHS=1", "DEVICE=cpu",
    "MODEL.VIT.MSVIT.ARCH=l1,h1,d16,n1,s1,g1,p4,f3,a0_l2,h2,d32,n1,s1,g1,p2,f3,a0",
)  # fmt: skip
FAKE = (
    "DATA.TRAIN=[fake]", "DATA.TEST=[fake]", "DATA.NUM_CLASSES=4",
    "DATA.KWARGS={n: 16, size: 32, num_classes: 4}",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def train(folder: str, *words: str, data: tuple[str, ...] = FAKE) -> int:
    return main(["train", *TINY, *data, "--output_dir", folder, *words])


def metrics(folder: str, split: str) -> list[dict]:
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"].startswith(split)]


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
    assert train("run", "AUG.SCALE=(0.5, 1)", "DATALOADER.RE=no") == 0
    assert train("again", "--config-file", "run/config.yaml", "OPTIM.LR=0.02") == 0
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
    folder = Path("data/MNIST/raw")
    folder.mkdir(parents=True)
    for split, count in (("train", 32), ("t10k", 20)):
        labels = np.arange(count, dtype=np.uint8) % 10
        pixels = np.random.default_rng(0).integers(0, 256, (count, 28, 28), np.uint8)
        write_idx(folder / f"{split}-images-idx3-ubyte", pixels)
        write_idx(folder / f"{split}-labels-idx1-ubyte", labels)
    mnist = ("DATA.TRAIN=[mnist]", "DATA.TEST=[mnist]", "DATA.NUM_CLASSES=10", "DATA.PATH=data")
    assert train("run", data=mnist) == 0
    assert metrics("run", "val/mnist")[0]["count"] == 20


def write_idx(file: Path, array: np.ndarray) -> None:
    """The format of yann.lecun.com/exdb/mnist: unsigned bytes (8), the sizes, the numbers."""
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    file.write_bytes(head + array.tobytes())


@pytest.mark.defect("B28")
def test_an_odd_batch_is_mixed():
    """B28. The original's mixup refused it."""
    assert train("run", "DATALOADER.BSZ=5", "AUG.MIXUP_PROB=1", "AUG.MIXUP=0.8") == 0
    assert len(metrics("run", "train")) == 3


@pytest.mark.defect("B29")
@pytest.mark.parametrize("name", ["multisoftmax", "mse"])
def test_a_loss_of_several_labels_is_refused_by_name(name, capsys):
    """B29. The 2021 config accepted them, and the loop ended with a traceback."""
    assert train("run", f"LOSS.LOSS={name}") == 2
    assert f"{name} is not a loss of single-label classification" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.defect("B32")
def test_the_cuda_kernel_by_its_old_name(capsys):
    """B32. It failed with an obscure error. On a CPU it is now rejected in one line."""
    assert train("run", "MODEL.VIT.MSVIT.ATTN_TYPE=longformer_cuda") == 2
    said = capsys.readouterr().err
    assert "triton" in said
    assert said.count("\n") == 1
    assert not Path("run").exists()
