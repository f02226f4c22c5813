"""Command lines of documentation: what they hand to `vil`, smaller settings, and their files.

A command is understood if a wrong key behind its words is all that is wrong with it.
"""

import json
import re
import shlex
import shutil
from functools import partial
from glob import glob
from pathlib import Path

import torch
from fixtures.saved_runs import FOLDER, Commands, output
from PIL import Image

import vil
from tests.common.data_files import samples, write_hf, write_shards, write_tsv
from tests.common.saved_runs import copy_run
from vil.tasks.segmentation.data import build_segmentation_set
from vil.utils.extras import is_installed

ROOT = Path(__file__).parents[2]
LEGACY = ROOT / "tests/legacy"
# These take no keys, or ignore wrong ones: they are quick and run at once.
WITHOUT_KEYS = (
    "visualize pattern", "benchmark attention", "detect check", "config",
    "report runs/nano --no-eval", "report runs/fold",
)  # fmt: skip
WRONG = "NO.SUCH_KEY"

TINY = (
    "INPUT.IMAGE_SIZE=32", "DATALOADER.BSZ=8", "DATALOADER.WORKERS=0", "OPTIM.EPOCHS=1",
    "SOLVER.WARMUP_EPOCHS=0", "DEVICE=cpu", "DATA.NUM_CLASSES=10", "AMP.ENABLED=False",
    "MODEL.VIT.MSVIT.ARCH=l1,h1,d8,n1,s1,g1,p4,f3,a0_l2,h2,d16,n1,s1,g1,p2,f3,a0",
)  # fmt: skip
# The model of the weights under the names that commands use.
NANO = (
    *TINY, "INPUT.IMAGE_SIZE=64",
    "MODEL.VIT.MSVIT.ARCH=l1,h1,d32,n1,s1,g1,p4,f4,a0_l2,h2,d64,n2,s1,g1,p2,f3,a0"
    "_l3,h4,d128,n1,s0,g1,p2,f3,a0",
)  # fmt: skip
FAKE = ("DATA.TRAIN=fake", "DATA.TEST=fake", "DATA.KWARGS={n: 16, size: 32, num_classes: 10}")
FEW_STEPS = ("DATALOADER.BSZ=256", "DATALOADER.WORKERS=0")
BENCHMARK = ("--grids", "6", "--window", "3", "--heads", "1", "--batch", "1", "--rounds", "1")
DETECTOR = (
    "DETECTION.INPUT.TRAIN_SIZES=[64]", "DETECTION.INPUT.MAX_SIZE=96", "DETECTION.FPN.STAGES=[2,3]",
    "DETECTION.ANCHORS.SIZES=[16,32,64]", "DETECTION.RPN.POST_NMS_TRAIN=20",
    "DETECTION.BOX.CHANNELS=16", *NANO, "DATALOADER.BSZ=1",
)  # fmt: skip
SCENES = ("DATA.KWARGS={train: 4, val: 2}", "OPTIM.EPOCHS=1", "DATALOADER.WORKERS=0")
OF_MINE = ("DATA.KWARGS={images: '{split}', annotations: '{split}.json'}",)
MASKS = (*TINY[:6], TINY[8], "MODEL.MODEL_PATH=", "SEGMENTATION.CHANNELS=8")
PHOTOS = (*TINY[:6], TINY[8])
OF_THREE = (*NANO, "DATA.NUM_CLASSES=3")
DIGITS = (*PHOTOS, "DATA.TRAIN=digits", "DATA.TEST=digits", "DATALOADER.BSZ=64")
NO_DOWNLOAD = (*PHOTOS, "MODEL.PRETRAINED=False")
# {start of a command: words to append}; the longest start that fits counts.
SMALLER: dict[str, tuple[str, ...]] = {
    "train --config-file digits": ("OPTIM.EPOCHS=1", "INPUT.IMAGE_SIZE=32", *FEW_STEPS, *TINY[4:6]),
    "train --config-file digits/vil_nano.yaml --data photos": PHOTOS,
    "train --config-file digits/vil_nano_96.yaml": (*TINY, "DATA.NUM_CLASSES=5"),
    "train --config-file imagenet": (*TINY, *FAKE, "MODEL.VIT.MSVIT.TUNE=False"),
    "train --config-file imagenet/vil_tiny_rpb.yaml --data photos": PHOTOS,
    "train --config-file own": PHOTOS,
    "train --config-file leaves.yaml": PHOTOS,
    "train --config-file own/vil_tiny_224.yaml --data photos --output_dir runs/finetuned": OF_THREE,
    "train --config-file own/vil_tiny_224.yaml --data photos --output_dir runs/timm": NO_DOWNLOAD,
    "train --config-file own/vil_tiny_224.yaml --data photos --output_dir runs/dinov2": NO_DOWNLOAD,
    "train --config-file own/vil_nano_96.yaml --data photos --output_dir runs/small": DIGITS,
    "embed --probe --run runs/distilled": ("DATA.NUM_CLASSES=auto",),  # of a classifier here
    "embed --probe --run runs/masked": ("DATA.NUM_CLASSES=auto",),  # here too
    "embed --probe --data photos": ("INPUT.IMAGE_SIZE=56", "DEVICE=cpu"),
    "train --config-file own/faster_rcnn": DETECTOR,
    "train --config-file own/segmentation": MASKS,
    "train --config-file scenes": SCENES,
    "train --config-file segmentation/scenes": (*SCENES, *MASKS, "DATALOADER.BSZ=4"),
    "train --config-file mine.yaml": DETECTOR,
    "sweep": ("--dry-run",),  # tests/workflows/test_sweep_runs.py trains
    "tune": (*TINY, "--backends", "blocked", "--rounds", "1"),
    "benchmark attention": BENCHMARK,
    "benchmark model": (*TINY, "--rounds", "1", "--beside", "none", "--out", "runs/model"),
    "export --config-file": NANO,
    "visualize attention": ("--token", "20,16"),  # the run's images have 32 pixels, not 64
    "visualize attention photo.jpg --config-file": NANO,
    "evaluate --config-file": (*NANO, *FAKE),
    "convert model_best.pth at_384": (NANO[-1], "INPUT.IMAGE_SIZE=96", "DATA.NUM_CLASSES=10"),
    "train --config-file coco": (*DETECTOR, "--data", "mine", *OF_MINE),
}  # fmt: skip


def vil_words(line: str) -> list[str] | None:
    """What a line hands to `vil`; None of one that starts something else."""
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=\S+", word)]
    if words[0] == "vil":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1] == "vil":
        return words[words.index("-m") + 2 :]
    ends = ("tools/train.py", "train_slurm.sh")
    at = next((at for at, word in enumerate(words) if word.endswith(ends)), None)
    return None if at is None else ["train", *words[at + 1 :]]


def has_keys(words: list[str]) -> bool:
    return not " ".join(words).startswith(WITHOUT_KEYS)


def smaller(words: list[str]) -> tuple[str, ...]:
    text = " ".join(words)
    fits = [start for start in SMALLER if text.startswith(start)]
    return SMALLER[max(fits, key=len)] if fits else ()


def expanded(words: list[str], place: Path) -> list[str]:
    """As the shell does it in the folder. A pattern after --run is quoted."""
    return [
        found
        for before, word in zip(["", *words], words)
        for found in (
            sorted(glob(word, root_dir=place)) if "*" in word and before != "--run" else [word]
        )
    ]


def run_line(commands: Commands, words: list[str], place: Path) -> None:
    """Run a line in the folder, with smaller settings. A new run gets an empty folder."""
    words = expanded(words, place)
    if "train" in words[:2] and "--resume" not in words and "--output_dir" in words:
        shutil.rmtree(place / words[words.index("--output_dir") + 1], ignore_errors=True)
    output(partial(commands, place), *words, *smaller(words))


def write_folds(place: Path) -> None:
    """Write two sets of ten images, and two runs, each tested on one of them."""
    sets = ("part0", "part1")
    (place / "parts").mkdir()
    for split, name in zip(("train", "val"), sets):
        write_tsv(place / "parts", split, samples(split), name=name)
    for number, (test, train) in enumerate(zip(sets, reversed(sets))):
        config = copy_run("classifier", place / f"runs/fold{number}") / "config.yaml"
        text = config.read_text().replace("TRAIN: [digits]", f"TRAIN: [{train}.yaml]")
        text = text.replace("TEST: [digits]", f"TEST: [{test}.yaml]")
        config.write_text(text.replace("PATH: ./datasets", "PATH: parts"))
        shutil.copytree(config.parent, place / f"sweeps/folds/runs/{number}")


def write_masks(place: Path) -> None:
    """Write images with masks, and two runs of segmentation."""
    for split, count in (("train", 8), ("val", 2)):
        dataset = build_segmentation_set("fake_masks", place, split, n=count, size=40)
        for number in range(count):
            files = [place / f"pixels/{kind}/{split}/{number}.png" for kind in ("images", "masks")]
            for file in files:
                file.parent.mkdir(parents=True, exist_ok=True)
            dataset.image(number).save(files[0])
            Image.fromarray(dataset.mask(number).clip(0).astype("uint8")).save(files[1])
    words = [*MASKS, "TASK=segmentation", "SEGMENTATION.MODEL=mlp", "DATA.NUM_CLASSES=auto"]
    words += ["DATA.TRAIN=folder", "DATA.TEST=folder", f"DATA.PATH={place / 'pixels'}"]
    vil.train(None, words, output_dir=place / "runs/pixels")
    shutil.copytree(place / "runs/pixels", place / "runs/scene_pixels", symlinks=True)


def write_files(place: Path) -> None:
    """Write what the commands name: runs, weights, images, annotations, configs."""
    write_masks(place)
    for name in (
        "nano",
        "photos",
        "nested",
        "sets",
        "angle",
        "plain",
        "weighted",
        "sampled",
        "distilled",
        "masked",
    ):
        copy_run("classifier", place / "runs" / name)
    copy_run("detector", place / "runs/scenes")
    write_folds(place)
    for folder, count in (("photos/train", 8), ("photos/val", 2)):
        for number in range(3 * count):
            path = place / folder / f"class{number % 3}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 36), (80 * (number % 3), number, 50)).save(path)
    for split in ("train", "val"):
        files = samples(split, per_class=2)
        write_shards(place / "shards", split, files, name="photos-{}-{:03}.tar")
    if is_installed("datasets"):
        write_hf(place, "pets")
    rows = [f"train/class{n % 3}/{n}.png,kind {n % 3}" for n in range(24)]
    (place / "photos/labels.csv").write_text("\n".join(["path,label", *rows]))
    shutil.copytree(place / "photos", place / "pictures")
    shutil.copytree(place / "photos/train", place / "leaves")
    (place / "leaves.yaml").write_text(
        "_BASE_: own/vil_nano_96.yaml\nDATA: {PATH: leaves, VAL: [folder], VAL_FRACTION: 0.2, "
        "TEST_FRACTION: 0.2}\nOPTIM: {EPOCHS: 1}\nSOLVER: {WARMUP_EPOCHS: 0}\n"
        "DATALOADER: {BSZ: 8, WORKERS: 0}\n"
    )
    photo = Image.open(FOLDER / "three.png")
    for name in (
        "photo.jpg",
        "photo.png",
        "new/1.png",
        "data/scenes1/val/1.png",
        "mine/train/1.png",
    ):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        photo.save(place / name)
    photo.resize((300, 200)).convert("RGB").save(place / "map.png")
    annotation = {"category_id": 1, "bbox": [4, 4, 20, 20], "area": 400, "iscrowd": 0,
                  "segmentation": [[4, 4, 24, 4, 24, 24, 4, 24]]}  # fmt: skip
    numbers = range(1, 11)
    for number in numbers:
        Image.new("RGB", (48, 48), (20 * number, 100, 50)).save(place / f"mine/train/{number}.png")
    table = {
        "images": [dict(id=i, file_name=f"{i}.png", width=48, height=48) for i in numbers],
        "annotations": [{"id": i, "image_id": i, **annotation} for i in numbers],
        "categories": [{"id": number, "name": f"kind {number}"} for number in range(1, 11)],
    }
    for name in ("train", "val"):
        (place / f"mine/{name}.json").write_text(json.dumps(table))
    shutil.copytree(place / "mine/train", place / "mine/val")
    (place / "mine.yaml").write_text(
        "_BASE_: coco/mask_rcnn_vil_tiny_1x.yaml\nDATA:\n  NUM_CLASSES: 10\n"
        '  KWARGS: {images: "{split}", annotations: "{split}.json"}\n'
    )
    (place / "docs/images").mkdir(parents=True)
    (place / "docs/reference").mkdir()
    state = vil.get_model("vil_nano", img_size=64, num_classes=10).state_dict()
    (place / "their").mkdir()
    shutil.copy(LEGACY / "config.yaml", place / "their")
    for name in ("model_best.pth", "best.pth", "their/model_best.pth"):
        torch.save({"net": state, "arch": "msvit", "epoch": 3}, place / name)
    detector = {f"backbone.bottom_up.{name}": tensor for name, tensor in state.items()}
    torch.save({"model": detector}, place / "model_final.pth")
