"""What is wrong is said in one line, with the documented exit code, and leaves nothing behind."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import vil as package
from tests.common.small_runs import SMALL, TINY, draw_pictures, vil
from vil.cli.removed import REMOVED
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
    "weights": ("LOSS.CLASS_WEIGHTS=[1,2]", r"has 2 numbers, but there are 4 classes"),
    "a word as weights": ("LOSS.CLASS_WEIGHTS=ballanced", r"did you mean balanced\?$"),
    "no weights": ("LOSS.CLASS_WEIGHTS=[0,0]", r"none, balanced, or a list"),
    "sampler": ("DATALOADER.SAMPLER=balance", r"did you mean balanced"),
    "adjustment": ("LOSS.LOGIT_ADJUSTMENT=1 LOSS.LOSS=bce", r"set LOSS\.LOSS to xentropy"),
    "task": ("TASK=multi-label", r"did you mean multilabel"),
    "mixed labels": ("TASK=multilabel AUG.MIXUP_PROB=0.5 AUG.MIXUP=1", r"AUG\.MIXUP_PROB to 0"),
    "loss of labels": ("TASK=multilabel MULTILABEL.LOSS=assymetric", r"did you mean asymmetric"),
    "sampler of labels": ("TASK=multilabel DATALOADER.SAMPLER=balanced", r"one class per image"),
    "means": ("TASK=regression REGRESSION.MEAN=[1,2]", r"REGRESSION\.MEAN has 2 numbers, but"),
    "deviations": ("TASK=regression REGRESSION.STD=[0,1,1,1]", r"auto, or numbers above 0"),
    "weight NaN": ("LOSS.CLASS_WEIGHTS=[1,nan,1,1]", r"expected none, balanced, or a list of num"),
    "batch norm": ("MODEL.ARCH=timm/test_resnet DATALOADER.BSZ=1", r"DATALOADER\.BSZ 1 is one im"),
    "batch norm of torchvision": (
        "MODEL.ARCH=resnet18 DATALOADER.BSZ=1",
        r"set DATALOADER\.BSZ to",
    ),
    "batch norm of labels": ("TASK=multilabel MODEL.ARCH=resnet18 DATALOADER.BSZ=1", r"at least 2"),
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


LINES = [  # RUN is the folder of a run, TINY its settings, photos and photo.png images
    ("trian", r"unknown command 'trian'; did you mean train\?"),
    ("train --config-file nope.yaml", r"nope\.yaml: no such config file"),
    ("train --cfg digits/vil_nan.yaml", r"did you mean digits/vil_nano\.yaml\?"),
    ("train --cfg run.py", r"run\.py: the name of a config must end in \.yaml"),
    ("train --epochs 3", r"--epochs; did you mean the config key OPTIM\.EPOCHS, as in OPTIM\.EPO"),
    ("train --lr=0.1 TINY", r"did you mean the config key OPTIM\.LR, as in OPTIM\.LR 0\.1\?"),
    ("train --batch-size 8", r"did you mean the config key DATALOADER\.BSZ"),
    ("info OPTIM.LRR 3", r"did you mean OPTIM\.LR\?"),
    ("evaluate --run nowhere", r"there is no folder nowhere: expected the folder of a run"),
    ("evaluate --run photos", r"--run photos is not the folder of a run: it has no config\.yaml"),
    ("evaluate --run RUN --cfg digits/vil_nano.yaml", r"leave --config-file out"),
    (
        "predict --run RUN",
        r"give either images \(files, folders, or - for standard input\) or --sam",
    ),
    ("predict --run RUN --images photos --top 0", r'--top: expected an integer .* 1, or "all"'),
    ("predict --run RUN --images photos DEVICE cpu", r"--images DEVICE: write KEY VALUE pairs be"),
    ("predict --run RUN photos --classes two.txt", r"two\.txt has 2 lines, .*NUM_CLASSES is 4"),
    ("predict --run RUN photos --output-file no/where", r"--output-file no/where: there is no"),
    ("predict --run RUN photos --tta hflop", r"did you mean 'hflip'"),
    ("predict --run RUN photos --threshold 1.5", r"a probability from 0 to 1, got '1\.5'"),
    ("predict --run RUN photos --format probabilities --threshold 0.5", r"remove --threshold"),
    ("predict --run RUN RUN", r"run is the folder of a run, not of images: write --run"),
    ("embed --run RUN photos", r"a file for the features: add --output-file features\.npy"),
    ("embed --run RUN --output-file f.npy", r"expected images \(files, folders, or - for stan"),
    ("embed --run RUN --probe --output-file f.npy", r"--probe uses the config's data"),
    ("embed --run RUN --probe DATA.TEST=[nothing_such]", r"nothing_such"),
    ("report RUN --out page.png", r"--out page\.png: expected a name that ends in \.html, \.htm"),
    ("report RUN bare", r"bare"),
    ("export --run RUN --out m.onnx --format yaml", r"--to: invalid choice: 'yaml'"),
    ("export --run RUN --out m.bin", r"--out m\.bin: expected a name that ends in \.onnx"),
    ("export --run RUN --out m.pt2 --format onnx", r"\.pt2 does not match --format onnx"),
    ("export --run RUN --out m.onnx --calibration .", r"has no effect without --int8"),
    ("export --run RUN --out m.pt2 --int8", r"--int8 needs --format onnx, got torch"),
    ("export --run RUN --out m.onnx --opset 5", r"opset 5 is not supported: choose from 18 to"),
    ("export --run RUN --out m.pt2 --size 8", r"images of 8x8 are too small .* 16 pixels"),
    (
        "export --run RUN --out m.pt2 --dynamic batch --size 40 --check",
        r"--check: .* 32 pixels .* 40x40",
    ),
    ("visualize attention photo.png --run RUN --token 40,0", r"outside of 32 x 32 pixels"),
    ("visualize attention photo.png --run RUN --stage 1 --block 2", r"--block 2 does not exist"),
    ("visualize attention photo.png --run RUN --out a.gif", r"--out a\.gif: .* ends in \.png"),
    ("visualize pattern --window 4 --grid 7x", r"--grid 7x: expected rows and columns, such as"),
    ("visualize pattern --grid 7x5 --window 4 --token 7,3", r"outside of 7 x 5 tokens"),
    ("visualize pattern --grid 7x5 --window 1000", r"--window 1000: expected at most 256"),
    ("visualize pattern --grid 7x5 --window 4 --sw-exact 1 --mode 3", r"needs all nine chunks"),
    ("visualize pattern --grid 7x5 --pattern axail", r"did you mean 'axial'"),
    ("visualize pattern --grid 7x5 --pattern axial --window 3", r"not allowed with argument"),
    ("visualize pattern --grid 7x5", r"one of the arguments --window --pattern is required"),
    ("benchmark attention --backends bloked", r"did you mean 'blocked'\?.*sdpa"),
    ("benchmark attention --dtype float33", r"unknown dtype 'float33'; did you mean 'float32'\?"),
    ("benchmark attention --modes 9", r"mode must be -1 .* or 1\.\.8 .*, got 9"),
    ("benchmark attention --grids 0", r"--grids: .* at least 1, got '0'"),
    ("benchmark attention --device tpu", r"--device: expected auto, cpu or cuda, got 'tpu'"),
    ("benchmark attention --out two.txt/below", r"--out two\.txt/below: "),
    ("benchmark model --cfg digits/vil_nano.yaml --ways fp32+nhvc", r"did you mean 'nhwc'\?"),
    ("benchmark model --cfg digits/vil_nano.yaml --backends blockd", r"did you mean 'blocked'\?"),
    ("benchmark model TINY --rounds 0", r"--rounds: expected an integer of at least 1"),
    ("tune TINY --backends blokked", r"unknown backend 'blokked'; did you mean 'blocked'\?"),
    ("tune TINY --rounds 0", r"--rounds and --max-gib must be positive"),
    ("tune TINY --import nowhere.py", r"--import nowhere\.py: no such Python file"),
    ("tune TINY --import mine.py", r"--import mine\.py, line 1: ModuleNotFoundError: No module"),
]


@pytest.mark.parametrize(("line", "pattern"), LINES, ids=[line for line, _ in LINES])
def test_command_lines_that_cannot_be(line, pattern, trained, tmp_path):
    draw_pictures(".", {"photos": 1})
    Image.new("RGB", (32, 32)).save("photo.png")
    Path("two.txt").write_text("one\ntwo\n")
    Path("mine.py").write_text("import nothing_of_this_name\n")
    before = set(tmp_path.rglob("*"))
    line = line.replace("RUN", str(trained)).replace("TINY", shlex.join(TINY))
    ended = vil(*shlex.split(line))
    assert (ended.code, ended.out) == (USAGE, ""), ended.err
    (said,) = [each for each in ended.err.splitlines() if each.startswith("vil")]
    assert re.search(pattern, said), ended.err
    assert {file for file in tmp_path.rglob("*") if "__pycache__" not in file.parts} == before


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


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_command_or_option_says_what_to_do_instead(name):
    refused(vil(*name.split()), USAGE, re.escape(f"{name} was removed: {REMOVED[name]}"))


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


@pytest.mark.parametrize("command", ["evaluate --run", "report"])
def test_a_run_without_a_checkpoint(command):
    Path("started").mkdir()
    Path("started/config.yaml").write_text("VERSION: 1\n")
    ended = vil(*command.split(), "started")
    refused(ended, CHECKPOINT, r"started has no best checkpoint yet", lines=None)
