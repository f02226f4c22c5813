"""What users of the 2021 code typed works as they typed it: the lines of tests/legacy/commands.sh.

Each line is run with its own words, followed by SMALLER: the later value wins, so what the user
typed is read and checked, and the run takes a second.
"""

import argparse
import io
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import vil as package
from tests.common.built import task_of
from tests.common.small_runs import checkpoint, environment, free_port, metrics, results, vil
from vil.cli.arguments import config_arguments, resolve
from vil.config import diff, get_config
from vil.config.defaults import leaves
from vil.engine.distributed import DistInfo
from vil.pretrained.convert_2021 import use_2021_rules
from vil.pretrained.load_weights import get_2021_names

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests/legacy"
ARCH = "MODEL.VIT.MSVIT.ARCH"
SMALLER = (
    "INPUT.IMAGE_SIZE", "32", "DATALOADER.BSZ", "8", "DATALOADER.WORKERS", "0", "OPTIM.EPOCHS", "1",
    "SOLVER.WARMUP_EPOCHS", "0.5", "DATA.NUM_CLASSES", "4", "LOG_FREQ", "1", "DEVICE", "cpu",
)  # fmt: skip
PICTURES = {"train": 16, "val": 12}


def lines_of(text: str) -> dict[str, list[str]]:
    """{name: words} of the `# name` paragraphs."""
    paragraphs = (part.partition("\n") for part in text.replace("\\\n", " ").split("\n# ")[1:])
    return {name: shlex.split(words) for name, _, words in paragraphs}


LINES = lines_of((OLD / "commands.sh").read_text())
EVALUATIONS = [name for name in LINES if name.startswith("evaluate-")]


def value(line: list[str], key: str) -> str:
    """What follows `key` in a line."""
    return line[line.index(key) + 1]


def shrunk(arch: str) -> str:
    """The same letters in the same order; one block a stage, heads 8 wide, f at most 16, g 2."""
    heads = iter(re.findall(r"h(\d+)", arch))
    arch = re.sub(r"d\d+", lambda _: f"d{8 * int(next(heads))}", arch)
    arch = re.sub(r"n\d+", "n1", arch)
    return re.sub(
        r"([fg])(\d+)", lambda m: m[1] + str(min(int(m[2]), {"f": 16, "g": 2}[m[1]])), arch
    )


def as_typed(name: str, *more: str) -> list[str]:
    """The words after the script's name, as a launcher hands them on, then the smaller ones."""
    line = LINES[name]
    script = line.index("run_experiment.py")
    rank = ["--local_rank=0"] if "torch.distributed.launch" in line else []
    return [*rank, *line[script + 1 :], *SMALLER, ARCH, shrunk(value(line, ARCH)), *more]


def config_of(words: list[str]):
    parser = argparse.ArgumentParser()
    config_arguments(parser)
    return resolve(parser.parse_intermixed_args(words))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """src/ with the original's configs, and beside it ImageNet in the original's format."""
    root = tmp_path_factory.mktemp("old")
    (root / "src/config").mkdir(parents=True)
    for name in ("msvit.yaml", "msvit_384finetune.yaml"):
        shutil.copy(OLD / name, root / "src/config")
    data = root / "datasets/imagenet/2012"
    data.mkdir(parents=True)
    for split, count in PICTURES.items():
        with zipfile.ZipFile(data / f"{split}.zip", "w") as archive:
            for number in range(count):
                archive.writestr(f"n0{number % 4}/{number}.jpg", picture(number))
        lines = [f"{split}.zip@/n0{n % 4}/{n}.jpg\t{n % 4}\n" for n in range(count)]
        (data / f"{split}_map.txt").write_text("".join(lines))
    return root / "src"


def picture(number: int) -> bytes:
    """A JPEG of 40 x 40 pixels, a colour per class."""
    file = io.BytesIO()
    Image.new("HSV", (40, 40), (64 * (number % 4), 200, 100 + number)).convert("RGB").save(
        file, "JPEG"
    )
    return file.getvalue()


@pytest.fixture
def here(source, monkeypatch) -> Path:
    monkeypatch.chdir(source)
    return source


# Training


def succeeds(words: list[str]) -> str:
    ended = vil("train", *words)
    assert ended.code == 0, ended.err
    return ended.out


def test_training_recipes(here):
    """The second differs from the first by random shift alone, and that makes another loss."""
    losses = []
    for name in ("train-tiny-rpe", "train-tiny-rpe-random-shift"):
        succeeds(as_typed(name))
        run = here.parent / "run" / name
        steps = metrics(run, "train")
        assert [line["step"] for line in steps] == [1, 2]
        assert metrics(run, "val/imagenet")[0]["count"] == PICTURES["val"]
        assert checkpoint(run).name == "step-00000002"
        losses.append(steps[0]["loss"])
    assert losses[0] != losses[1]


@pytest.mark.defect("B23")
@pytest.mark.long
def test_the_old_launcher_starts_two_processes(here):
    """torch.distributed.launch, which hands each of them --local-rank."""
    line = LINES["train-tiny-rpe"]
    settings = {"--nproc_per_node": 2, "--master_port": free_port()}
    launcher = [word.partition("=")[0] for word in line[1 : line.index("run_experiment.py")]]
    launcher = [f"{word}={settings[word]}" if word in settings else word for word in launcher]
    words = as_typed("train-tiny-rpe", "DATALOADER.WORKERS", "1")[1:]
    words[words.index("--output_dir") + 1] = "../run/two"
    ended = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "tools/train.py"), *words],
        env=environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert [line["step"] for line in metrics("../run/two", "train")] == [1, 2]
    assert metrics("../run/two", "val")[0]["count"] == PICTURES["val"]
    assert "ranks 2" in Path("../run/two/env.txt").read_text()


def test_fine_tuning_at_another_size(here):
    """Windows f8 and f12 instead of f7, 48 pixels instead of 32, four of six classes.

    The one word to add is FINETUNE.HEAD: the original took the first rows without a word.
    """
    arch = shrunk(value(LINES["finetune-384"], ARCH))
    before = arch.replace("f8", "f7").replace("f12", "f7")
    pretrained = config_of(as_typed("finetune-384", "DATA.NUM_CLASSES", "6", ARCH, before))
    save_original(pretrained)
    words = as_typed("finetune-384", "INPUT.IMAGE_SIZE", "48")
    refused = vil("train", *words)
    assert refused.code == 4
    assert "FINETUNE.HEAD" in refused.err

    Path("rows.txt").write_text("0\n1\n2\n3\n")
    shown = succeeds([*words, "FINETUNE.HEAD", "rows:rows.txt"])
    assert "resized: layer1.0.x_pos_embed (1, 8, 12) -> (1, 12, 12)" in shown
    run = here.parent / "run/finetune-384"
    assert get_config(run / "config.yaml").OPTIM.OPT == "qhm"
    assert metrics(run, "val/imagenet")[0]["count"] == PICTURES["val"]


# Evaluation


def save_original(cfg) -> torch.nn.Module:
    """Write MODEL.MODEL_PATH as the original did; returns the model it was made of."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.SEED = 7  # other weights than the run's own first ones
    model = package.build_model(cfg)
    use_2021_rules(model)
    names = get_2021_names(model)
    state = {names[name]: tensor for name, tensor in model.state_dict().items()}
    state |= surplus(state, cfg)
    path = Path(cfg.MODEL.MODEL_PATH)
    path.parent.mkdir(parents=True, exist_ok=True)
    net = {f"module.{name}": tensor.clone() for name, tensor in state.items()}
    file = {"net": net, "arch": "msvit", "epoch": 3, "best_acc": 12.3, "optimizer": {}}
    torch.save(file, path)
    return model


def surplus(state: dict[str, torch.Tensor], cfg) -> dict[str, torch.Tensor]:
    """What the original's files hold besides weights: aliases of shared ones, and counters."""
    vit, found = cfg.MODEL.VIT.MSVIT, {}
    globals_of = dict(enumerate(map(int, re.findall(r"g(\d+)", vit.ARCH)), start=1))
    for name, tensor in state.items():
        stage = int(match[1]) if (match := re.match(r"layer(\d+)", name)) else 0
        sparse = name.partition(".attn.")[0] + ".attn.query.weight" in state
        shared = re.search(r"\.attn\.(query|kv|proj)\.", name)
        if vit.ATTN_TYPE.startswith("longformer") and sparse and shared and globals_of[stage]:
            found[name.replace(shared[1], f"{shared[1]}_global")] = tensor
        if name.endswith("proj_k") and vit.SHARE_KV:
            found[name.replace("proj_k", "proj_v")] = tensor
        if name.endswith("local_relative_position_bias_table"):
            index = name.replace("local_relative_position_bias_table", "relative_position_index")
            found[index] = torch.zeros(49, 441, dtype=torch.int64)
    if vit.ATTN_TYPE == "performer":
        found["calls_since_last_redraw"] = torch.tensor(5)
    return found


@torch.no_grad()
def mean_loss(model: torch.nn.Module, cfg) -> float:
    """By hand, in the precision of the config (the old file switches AMP on)."""
    losses = []
    for batch in task_of(cfg).test_loaders(DistInfo())["imagenet"]:
        with torch.autocast("cpu", torch.bfloat16, enabled=cfg.AMP.ENABLED):
            logits = model.eval()(batch.to("cpu").images)
        losses.append(F.cross_entropy(logits.float(), batch.targets, reduction="none"))
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluation(here, name):
    """For every attention, a weight file of the original code gives the metrics of its weights."""
    words = as_typed(name)
    cfg = config_of(words)
    assert cfg.EVALUATE
    model = save_original(cfg)
    shown = succeeds(words)
    figures = results(here.parent / "run" / name)["imagenet"]
    assert figures["count"] == PICTURES["val"]
    assert figures["loss"] == pytest.approx(mean_loss(model, cfg), rel=1e-5)
    assert not re.search("missing|unexpected|mismatched", shown)


def test_every_attention_of_the_original_is_evaluated():
    types = {value(LINES[name], "MODEL.VIT.MSVIT.ATTN_TYPE") for name in EVALUATIONS}
    assert types == {
        "longformerhand", "longformerauto", "full", "linformer", "srformer", "performer",
    }  # fmt: skip


# Spellings

FORMS = [
    ("DATA.TRAIN", "('imagenet',)", ("imagenet",)),
    ("DATA.TEST", "('imagenet', 'v2/val.yaml')", ("imagenet", "v2/val.yaml")),
    ("DATA.TRAIN", "['imagenet']", ("imagenet",)),
    ("AUG.SCALE", "(0.25, 1.0)", (0.25, 1.0)),
    ("INPUT.MEAN", "[0.5, 0.5, 0.5]", [0.5, 0.5, 0.5]),
    (ARCH, "'l1,h1,d8_l2,h2,d16'", "l1,h1,d8_l2,h2,d16"),
    ("AUG.TIMM_AUG.AUTO_AUGMENT", "'rand-m9-mstd0.5-inc1'", "rand-m9-mstd0.5-inc1"),
    ("MODEL.MODEL_PATH", "", ""),
    ("OPTIM.LR", "5e-4", 5e-4),
    ("AMP.ENABLED", "True", True),
]


@pytest.mark.parametrize(("key", "text", "wanted"), FORMS)
def test_values_as_they_were_typed(key, text, wanted):
    assert leaves(config_of([key, text]))[key] == wanted


# Saved configs

SAVED = {
    "saved_performer.yaml": {
        "MODEL.VIT.MSVIT.ATTN_TYPE": "performer", "MODEL.VIT.MSVIT.MODE": 0,
        "OUTPUT_DIR": "/output/fullperformer1281", "DATALOADER.BSZ": 1024,
    },
    "saved_evaluation.yaml": {
        "EVALUATE": True, "MODEL.MODEL_PATH": "linformer/small1281_partial/model_best.pth",
        "DATA.TRAIN": ("imagenet", "imagenet_extra.yaml"), "AUG.SCALE": (0.25, 1.0),
        "DATA.TEST": ("imagenet", "imagenetv2/val.yaml"), "AUG.MIXCUT_MINMAX": [],
        "AUG.TIMM_AUG.AUTO_AUGMENT": "", "OUTPUT_PERCLASS_ACC": True,
    },
    "saved_finetune.yaml": {
        "OPTIM.OPT": "qhm", "OPTIM.WD": 0.0, "SOLVER.WARMUP_EPOCHS": 0.25, "INPUT.CROP_PCT": 0.922,
        "FINETUNE.FINETUNE": True, "AUG.TIMM_AUG.USE_TRANSFORM": False,
    },
}  # fmt: skip


@pytest.mark.defect("B10")
@pytest.mark.parametrize("name", SAVED)
def test_saved_configs_load(name):
    """As the original wrote them: str(cfg), with None, tuples, lists and words without quotes."""
    found = leaves(get_config(OLD / name))
    assert {key: found[key] for key in SAVED[name]} == SAVED[name]


@pytest.mark.defect("B10")
@pytest.mark.parametrize("name", ["msvit.yaml", "msvit_384finetune.yaml", "config.yaml"])
def test_what_yacs_prints_loads_back(tmp_path, name):
    """The string form of a tree, with the keys that a run of the original added to it."""
    cfg = get_config(OLD / name)
    printed = cfg.clone()
    printed.defrost()
    printed.distributed, printed.SOLVER.MAX_ITER = True, 375300
    file = tmp_path / "config.yaml"
    file.write_text(str(printed))
    assert get_config(file) == cfg


def test_the_defaults_are_the_original_s_but_for_three():
    """And every one of its keys is known."""
    changed = diff(get_config(OLD / "defaults.yaml"), get_config()).keys()
    assert changed == {ARCH, "MODEL.VIT.MSVIT.ATTN_TYPE", "OUTPUT_DIR"}
