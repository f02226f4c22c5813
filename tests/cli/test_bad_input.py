"""What is wrong is said in one line, with the documented exit code, and leaves nothing behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import vil as package
from tests.common.small_runs import SMALL, TINY, draw_pictures, vil
from vil.config import get_config
from vil.workflows import train as training

pytestmark = pytest.mark.smoke

USAGE, DATA, CHECKPOINT = 2, 3, 4
ARCH = "MODEL.VIT.MSVIT.ARCH"
MSVIT = "MODEL.VIT.MSVIT"


def refused(ended, code, pattern, lines=1):
    """The code, what is said, in how many lines (None: any number), and no folder of a run."""
    assert ended.code == code, ended.err
    assert re.search(pattern, ended.err), ended.err
    assert ended.out == ""
    if lines is not None:
        assert ended.err.count("\n") == lines, ended.err
    assert not Path("out").exists()
    assert not Path("runs").exists()


SETTINGS = {
    # keys and values
    "Swin's name": ("DATA.IMG_SIZE=3", r"unknown key; did you mean INPUT\.IMAGE_SIZE\?"),
    "a value's typo": (f"{MSVIT}.ATTN_TYPE=full,linfomer", r"did you mean linformer\?$"),
    "a config as a model": ("MODEL.ARCH=vil_tiny", r"--config-file imagenet/vil_tiny\.yaml"),
    "a config": ("configs/mine.yaml", r"mean --config-file configs/mine\.yaml\? \(see --help\)$"),
    "weight NaN": ("LOSS.CLASS_WEIGHTS=[1,nan,1,1]", r"expected none, balanced, or a list of num"),
    # architecture
    "letter": (f"{ARCH}=l1,h1,d16,z3", r"stage 1 .*: unknown letter 'z'"),
    "stage number": (f"{ARCH}=l1,h1,d16_l3,h1,d16", r"l \(.*\) is 3, but this is stage 2"),
    "heads": (f"{ARCH}=l1,h1,d16_l2,h3,d32", r"stage 2 .*: the width .* heads .*, got 32 and 3"),
    "small image": ("INPUT.IMAGE_SIZE=6", r"stage 2 has no tokens"),
    "attention": (f"{MSVIT}.ATTN_TYPE=longfrmer", r"ATTN_TYPE: expected one of full, longformer, "),
    "backend": (f"{MSVIT}.BACKEND=maskd", r"unknown backend 'maskd'; did you mean 'masked'\?"),
    # data
    "dataset": ("DATA.TRAIN=[fakee]", r"unknown dataset 'fakee'; did you mean 'fake'\?"),
    "classes": ("DATA.NUM_CLASSES=5", r"DATA\.NUM_CLASSES is 5, but fake has 4 classes"),
    "argument": ("DATA.KWARGS.nn=3", r"unknown argument \(DATA\.KWARGS\) of fake 'nn'"),
    "no UTF-8": ("DATA.PATH=a\udce4", r"DATA\.PATH: 'a\\udce4' cannot be encoded .*PYTHONUTF8=1"),
    # machine
    "device": ("DEVICE=tpu", r"DEVICE: expected auto, cpu, mps, cuda or cuda:N, got 'tpu'"),
    # models that are none of ours
    "model": ("MODEL.ARCH=resnet19", r"unknown MODEL\.ARCH 'resnet19'; did you mean 'resnet18'"),
    "timm model": ("MODEL.ARCH=timm/resnet19", r"unknown timm model 'resnet19'; did you mean "),
    "layers": ("MODEL.ARCH=resnet18 OPTIM.LAYER_DECAY=0.7", r"ResNet does not support OPTIM"),
    "stages": ("MODEL.ARCH=resnet18 FINETUNE.FREEZE_STAGES=1", r"resnet18 has no stages"),
    "pretrained": ("MODEL.PRETRAINED=True", r"for MODEL.ARCH msvit, set MODEL.MODEL_PATH"),
    # training
    "frozen": ("FINETUNE.FREEZE_STAGES=3", r"3 stages: the model has 2"),
    "larc": ("SOLVER.USE_LARC=True OPTIM.OPT=adam", r"LARC wraps sgd only"),
    "apex": ("OPTIM.OPT=apex_lamb", r"needs NVIDIA's apex.*unrelated"),
    "average": ("OPTIM.EMA=1", r"OPTIM\.EMA: expected at least 0 and below 1"),
    "too many parts": (f"{MSVIT}.ATTN_TYPE=full/full/full", r"names for 3 stages, but ARCH"),
}


@pytest.mark.defect("B15")
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be(name):
    words, pattern = SETTINGS[name]
    refused(vil("train", *TINY, *words.split(), "--output_dir", "out"), USAGE, pattern)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("trian", r"unknown command 'trian'; did you mean train\?"),
        ("train --config-file nope.yaml", r"nope\.yaml: no such config file"),
        ("train --cfg digits/vil_nan.yaml", r"did you mean digits/vil_nano\.yaml\?"),
        ("train --cfg run.py", r"run\.py: the name of a config must end in \.yaml"),
        ("evaluate --run nowhere", r"there is no folder nowhere: expected the folder of a run"),
        ("evaluate --run .", r"--run \. is not the folder of a run: it has no config\.yaml"),
        ("evaluate --run . --cfg digits/vil_nano.yaml", r"leave --config-file out"),
        ("info OPTIM.LRR 3", r"did you mean OPTIM\.LR\?"),
    ],
)
def test_command_lines_that_cannot_be(words, pattern):
    refused(vil(*words.split()), USAGE, pattern)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@pytest.mark.parametrize("command", ["train", "info"])
def test_a_device_that_is_not_there(command):
    ended = vil(command, *TINY, "DEVICE=cuda", "--output_dir", "out")
    refused(ended, USAGE, r"DEVICE cuda was not found \(available: .*cpu\)")


def test_a_folder_that_cannot_be_one():
    Path("file").write_text("mine")
    for folder in ("file", "file/below"):
        refused(vil("train", *TINY, "--output_dir", folder), USAGE, rf"{folder} cannot .*; choose")
    assert Path("file").read_text() == "mine"


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("process 7 on mars", file=file, flush=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_in_a_folder_in_use(tmp_path):
    folder = tmp_path / "used"
    folder.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder / "run.lock"], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout.readline() == "held\n"
        for words in ([], ["--resume"]):
            ended = vil("train", *TINY, "--output_dir", folder, *words)
            refused(ended, USAGE, r"used is in use by process 7 on mars: choose another --out")
        holder.stdin.close()
    assert [entry.name for entry in folder.iterdir()] == ["run.lock"]


def test_a_run_that_another_one_overtook(monkeypatch):
    """It found an empty folder, and builds its model while the other one trains there."""

    def overtaken(*args, task_for=training.task_for):
        monkeypatch.setattr(training, "task_for", task_for)
        assert vil("train", *TINY, "--output_dir", "used").code == 0
        return task_for(*args)

    monkeypatch.setattr(training, "task_for", overtaken)
    ended = vil("train", *TINY, "OPTIM.EPOCHS=9", "--output_dir", "used")
    assert (ended.code, ended.err.count("\n")) == (USAGE, 1), ended.err
    assert (
        "used was written by another run in the meantime: choose another --output_dir" in ended.err
    )
    assert '"step": 8' in Path("used/status.json").read_text()


# Data


@pytest.mark.parametrize(("command", "name"), [("train", "tar"), ("data check", "folder")])
def test_a_near_name_is_suggested_for_a_root(command, name):
    draw_pictures("signs", {"cat": 1})
    sets = [f"DATA.TRAIN=[{name}]", f"DATA.TEST=[{name}]", "DATA.NUM_CLASSES=auto"]
    ended = vil(*command.split(), *SMALL, *sets, "--data", "sings")
    wanted = r"there is no folder sings: set --data to the folder of your .*; did you mean signs\?"
    refused(ended, DATA, f"^vil {command}: {wanted}$")


# Weights


def save_weights(file, *words, **changes):
    """The tiny model's weights as initialised; a change of None leaves the tensor out."""
    state = package.build_model(get_config(None, [*TINY, *words])).state_dict() | changes
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(state, file) if file.endswith(".safetensors") else torch.save(state, file)


COMMANDS = pytest.mark.parametrize("command", ["train", "evaluate", "train EVALUATE=True"])


@pytest.mark.defect("B9")
@pytest.mark.parametrize("command", ["evaluate", "train EVALUATE=True"])
def test_random_weights_are_never_evaluated(command):
    ended = vil(*command.split(), *TINY, "--output_dir", "out")
    refused(ended, CHECKPOINT, r"no trained weights: set MODEL\.MODEL_PATH or give --run")


@pytest.mark.defect("B9")
@COMMANDS
def test_weights_that_are_not_there(command):
    words = ["MODEL.MODEL_PATH=best.pth", "DATA.DATA_DIR=zoo", "--output_dir", "out"]
    ended = vil(*command.split(), *TINY, *words)
    refused(ended, CHECKPOINT, r"no weights at best\.pth, nor at zoo/best\.pth: check")


@COMMANDS
def test_weights_of_another_model_are_listed(command):
    changes = {"norm.weight": None, "stages.9.extra": torch.ones(2), "head.bias": torch.ones(7)}
    save_weights("weights.pth", **changes)
    words = ["MODEL.MODEL_PATH=weights.pth", "--output_dir", "out"]
    ended = vil(*command.split(), *TINY, *words)
    refused(ended, CHECKPOINT, "the weights do not fit the model")
    assert "missing: norm.weight;" in ended.err
    assert "unexpected: stages.9.extra;" in ended.err
    assert "mismatched: head.bias (7,) -> (4,);" in ended.err
    assert "FINETUNE.HEAD" in ended.err


class Code:
    """Unpickling it would make the file `canary`."""

    def __reduce__(self):
        return os.mkdir, ("canary",)


@pytest.mark.defect("B12")
@COMMANDS
def test_files_that_are_not_a_state_dict(command):
    """Nothing in them is run. tests/pretrained has files of every kind."""
    torch.save({"head.weight": torch.ones(4, 32), "note": Code()}, "weights.pth")
    words = ["MODEL.MODEL_PATH=weights.pth", "--output_dir", "out"]
    refused(vil(*command.split(), *TINY, *words), CHECKPOINT, r"weights\.pth (holds|is damaged)")
    assert not Path("canary").exists()


def test_a_run_without_a_checkpoint():
    Path("started").mkdir()
    Path("started/config.yaml").write_text("VERSION: 1\n")
    refused(vil("evaluate", "--run", "started"), CHECKPOINT, r"started has no best checkpoint yet")
