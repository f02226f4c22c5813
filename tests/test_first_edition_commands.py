"""Every command line and Python example of the first edition's README and docs still works.

legacy/first_edition_commands.txt has the lines of its ```bash blocks with the page they stood on,
legacy/first_edition_python/ its ```python blocks, both word for word.

A command is understood if a wrong key behind its words is all that is wrong with them. With -m long
each is run as well, in a folder with the files it names, its words followed by smaller settings.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from glob import glob
from pathlib import Path

import pytest
import torch
from fixtures.old_edition import FOLDER, Commands, output
from PIL import Image

import vil

ROOT = Path(__file__).parent.parent
LEGACY = ROOT / "tests/legacy"
LINES = list(
    dict.fromkeys(
        line.partition("\t")[2]
        for line in (LEGACY / "first_edition_commands.txt").read_text().splitlines()
    )
)
PAGES: dict[str, list[Path]] = {}
for file in sorted((LEGACY / "first_edition_python").glob("*.py")):
    PAGES.setdefault(re.sub(r"^\d+_|_\d+$", "", file.stem), []).append(file)

NOT_OURS = ("chromium", "seq", "for")
# These take no keys, or leave wrong ones unread: they are quick and run at once.
WITHOUT_KEYS = (
    "visualize pattern", "benchmark attention", "detect check", "config",
    "report runs/nano --no-eval",
)  # fmt: skip
SLOW_PAGES = {"export", "attention", "patch_attention"}
WRONG = "NO.SUCH_KEY"

# ------------------------------------------------------------------------------- smaller settings

TINY = (
    "INPUT.IMAGE_SIZE=32", "DATALOADER.BSZ=8", "DATALOADER.WORKERS=0", "OPTIM.EPOCHS=1",
    "SOLVER.WARMUP_EPOCHS=0", "DEVICE=cpu", "DATA.NUM_CLASSES=10", "AMP.ENABLED=False",
    "MODEL.VIT.MSVIT.ARCH=l1,h1,d8,n1,s1,g1,p4,f3,a0_l2,h2,d16,n1,s1,g1,p2,f3,a0",
)  # fmt: skip
# The model of the weights that lie under the names which the commands give.
NANO = (
    *TINY, "INPUT.IMAGE_SIZE=64",
    "MODEL.VIT.MSVIT.ARCH=l1,h1,d32,n1,s1,g1,p4,f4,a0_l2,h2,d64,n2,s1,g1,p2,f3,a0"
    "_l3,h4,d128,n1,s0,g1,p2,f3,a0",
)  # fmt: skip
FAKE = ("DATA.TRAIN=fake", "DATA.TEST=fake", "DATA.KWARGS={n: 16, size: 32, num_classes: 10}")
BENCHMARK = ("--grids", "6", "--window", "3", "--heads", "1", "--batch", "1", "--rounds", "1")
DETECTOR = (
    "DETECTION.INPUT.TRAIN_SIZES=[64]", "DETECTION.INPUT.MAX_SIZE=96", "DETECTION.FPN.STAGES=[2,3]",
    "DETECTION.ANCHORS.SIZES=[16,32,64]", "DETECTION.RPN.POST_NMS_TRAIN=20",
    "DETECTION.BOX.CHANNELS=16", *NANO, "DATALOADER.BSZ=1",
)  # fmt: skip
OF_MINE = ("DATA.KWARGS={images: '{split}', annotations: '{split}.json'}",)
# {how a command begins: words that follow what its user typed}; the longest fits.
SMALLER: dict[str, tuple[str, ...]] = {
    "train --config-file digits": ("OPTIM.EPOCHS=1", *TINY[:3], *TINY[4:6]),
    "train --config-file digits/vil_nano.yaml --data photos": (*TINY[:6], TINY[8]),
    "train --config-file digits/vil_nano_96.yaml": (*TINY, "DATA.NUM_CLASSES=5"),
    "train --config-file imagenet": (*TINY, *FAKE, "MODEL.VIT.MSVIT.TUNE=False"),
    "tune": (*TINY, "--backends", "blocked", "--rounds", "1"),
    "benchmark attention": BENCHMARK,
    "benchmark model": (*TINY, "--rounds", "1", "--beside", "none", "--out", "runs/model"),
    "analyze --config-file imagenet/vil_small.yaml --layout": TINY,
    "export --config-file": NANO,
    "visualize attention": ("--token", "20,16"),  # the run's images have 32 pixels, not 64
    "visualize attention photo.jpg --config-file": NANO,
    "evaluate --config-file": (*NANO, *FAKE),
    "convert model_best.pth at_384": (NANO[-1], "INPUT.IMAGE_SIZE=96", "DATA.NUM_CLASSES=10"),
    "detect train --config-file scenes": (
        "DATA.KWARGS={train: 4, val: 2}", "OPTIM.EPOCHS=1", "DATALOADER.WORKERS=0",
    ),
    "detect train --config-file mine.yaml": DETECTOR,
    "train --config-file coco": (*DETECTOR, "--data", "mine", *OF_MINE),
}  # fmt: skip


def vil_words(line: str) -> list[str] | None:
    """What a line hands to `vil`; None of one that starts a script."""
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=\S+", word)]
    if words[0] == "vil":
        return words[1:]
    script = next((at for at, word in enumerate(words) if word.endswith("train.py")), None)
    slurm = next((at for at, word in enumerate(words) if word.endswith("train_slurm.sh")), None)
    at = slurm if script is None else script
    return None if at is None else ["train", *words[at + 1 :]]


COMMANDS = {line: words for line in LINES if (words := vil_words(line))}
KEYED = [line for line in COMMANDS if not " ".join(COMMANDS[line]).startswith(WITHOUT_KEYS)]


def smaller(words: list[str]) -> tuple[str, ...]:
    text = " ".join(words)
    fits = [start for start in SMALLER if text.startswith(start)]
    return SMALLER[max(fits, key=len)] if fits else ()


# ------------------------------------------------------------------------------------- the files


@pytest.fixture(scope="module")
def commands():
    started = Commands()
    yield started
    started.close()


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with what the commands name: runs, weights, pictures, annotations, configs."""
    for name in ("runs/nano", "runs/photos"):
        shutil.copytree(FOLDER / "classifier", tmp_path / name)
    shutil.copytree(FOLDER / "detector", tmp_path / "runs/scenes")
    for folder, count in (("photos/train", 8), ("photos/val", 2)):
        for number in range(3 * count):
            path = tmp_path / folder / f"class{number % 3}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 36), (80 * (number % 3), number, 50)).save(path)
    photo = Image.open(FOLDER / "three.png")
    for name in ("photo.jpg", "photo.png", "data/scenes1/val/1.png", "mine/train/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        photo.save(tmp_path / name)
    photo.resize((300, 200)).convert("RGB").save(tmp_path / "map.png")
    annotation = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [4, 4, 20, 20], "area": 400,
                  "iscrowd": 0, "segmentation": [[4, 4, 24, 4, 24, 24, 4, 24]]}  # fmt: skip
    table = {
        "images": [{"id": 1, "file_name": "1.png", "width": 48, "height": 48}],
        "annotations": [annotation],
        "categories": [{"id": number, "name": f"kind {number}"} for number in range(1, 11)],
    }
    for name in ("train", "val"):
        (tmp_path / f"mine/{name}.json").write_text(json.dumps(table))
    shutil.copytree(tmp_path / "mine/train", tmp_path / "mine/val")
    (tmp_path / "mine.yaml").write_text(
        "_BASE_: coco/mask_rcnn_vil_tiny_1x.yaml\nDATA:\n  NUM_CLASSES: 10\n"
        '  KWARGS: {images: "{split}", annotations: "{split}.json"}\n'
    )
    (tmp_path / "docs").mkdir()
    state = vil.get_model("vil_nano", img_size=64, num_classes=10).state_dict()
    (tmp_path / "their").mkdir()
    shutil.copy(LEGACY / "config.yaml", tmp_path / "their")
    for name in ("model_best.pth", "best.pth", "their/model_best.pth"):
        torch.save({"net": state, "arch": "msvit", "epoch": 3}, tmp_path / name)
    detector = {f"backbone.bottom_up.{name}": tensor for name, tensor in state.items()}
    torch.save({"model": detector}, tmp_path / "model_final.pth")
    return tmp_path


def expanded(words: list[str], place: Path) -> list[str]:
    """As the shell does it in the folder."""
    return [
        found
        for word in words
        for found in (sorted(glob(word, root_dir=place)) if "*" in word else [word])
    ]


# ------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("line", KEYED)
def test_every_word_is_understood(line, commands, place):
    ended = commands(place, *expanded(COMMANDS[line], place), WRONG, "1")
    assert ended.code == 2, ended.err
    assert f"{WRONG}: unknown key" in ended.err, ended.err


def test_scripts_and_configs_exist():
    """Of the lines that start something else than vil."""
    count = 0
    for line in LINES:
        words = shlex.split(line)
        for word in words:
            if re.fullmatch(r"(\./)?(scripts|tools|benchmarks)/\w+\.(sh|py)", word):
                assert (ROOT / word).is_file(), line
                count += 1
            elif re.match(r"(imagenet|coco|digits|scenes)/", word):
                assert (ROOT / "configs" / word).is_file(), line
                count += 1
        if words[0].startswith("scripts/coco_"):
            assert (ROOT / "configs/coco" / f"{words[1]}_1x.yaml").is_file()
    assert count > 30


def test_every_line_is_checked():
    for line in LINES:
        script = re.search(r"(^|\s)(\./)?(scripts|tools|benchmarks)/", line)
        assert line in COMMANDS or script or shlex.split(line)[0] in NOT_OURS, line
    assert len(COMMANDS) > 50


@pytest.mark.parametrize("line", [line for line in COMMANDS if line not in KEYED])
def test_commands_without_keys(line, commands, place):
    words = COMMANDS[line]
    output(partial(commands, place), *words, *smaller(words))


@pytest.mark.long
@pytest.mark.parametrize("line", KEYED)
def test_every_command_runs(line, commands, place):
    words = expanded(COMMANDS[line], place)
    if "train" in words[:2] and "--resume" not in words and "--output_dir" in words:
        shutil.rmtree(place / words[words.index("--output_dir") + 1], ignore_errors=True)
    if "/shared/runs/small" in words:
        words[words.index("/shared/runs/small")] = "runs/small"
    output(partial(commands, place), *words, *smaller(words))


# --------------------------------------------------------------------------------------- Python

# The files of a page one after the other, in one namespace: a later one may use an earlier one's
# names.
RUN_ALL = """
import sys
names = {"__name__": "__main__"}
for path in sys.argv[1:]:
    print("in", path, file=sys.stderr)
    exec(compile(open(path).read(), path, "exec"), names)
"""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long if page in SLOW_PAGES else ()) for page in PAGES],
)
def test_python_examples_run(page, place):
    if page == "data":
        shutil.copytree(place / "photos", place / "pictures")
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", RUN_ALL, *PAGES[page]]
    ended = subprocess.run(command, cwd=place, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
