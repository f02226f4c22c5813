"""Compare settings for rare classes on cut-outs of rendered scenes, of which 5 % show a zero.

  python benchmarks/imbalance.py [--folder FOLDER] [--json FILE]

There are two classes: zeros, which are 5 % of the images, and other digits. Training and validation
images are cut out of the training scenes. Test images are cut out of the validation scenes, which
have other scans of digits. All settings use the same learning rate: the best of RATES in runs with
another seed and without any setting for rare classes. The learning rate, and the checkpoint of each
run, are selected by balanced accuracy on the validation images. Prints balanced accuracy on the
test images. With --folder, an interrupted comparison can be resumed.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from shared import compare_seeds, train_variants

from vil.data.synthetic.scenes import write_scenes

SEEDS = (0, 1, 2)
SETTINGS = {
    "none": {},
    "class weights": {"LOSS.CLASS_WEIGHTS": "balanced"},
    "balanced sampling": {"DATALOADER.SAMPLER": "balanced"},
    "logit adjustment": {"LOSS.LOGIT_ADJUSTMENT": 1.0},
}
RATES = (5e-4, 1e-3, 2e-3)
FIXED = {
    "INPUT.IMAGE_SIZE": 32,
    "DATA.TRAIN": ["folder"],
    "DATA.VAL": ["folder"],
    "DATA.TEST": ["folder"],
    "DATA.NUM_CLASSES": 2,
    "AUG.MIXUP_PROB": 0.0,
    "LOSS.LABEL_SMOOTHING": 0.0,
    "AUG.TIMM_AUG.RE_PROB": 0.0,
    "OPTIM.EPOCHS": 15,
    "SOLVER.WARMUP_EPOCHS": 1,
    "EVAL.METRIC": "balanced_accuracy",
}
RARE = 0
COUNTS = {"train": 3200, "val": 600, "test": 1200}  # images, of which 5 % are rare


def cut_out(scenes: Path, split: str) -> tuple[list[Image.Image], np.ndarray]:
    """Cut the digits out of the scenes of a split. Returns (images, the digit in each image)."""
    file = json.loads((scenes / f"annotations/instances_{split}.json").read_text())
    names = {image["id"]: image["file_name"] for image in file["images"]}
    images, digits = [], []
    for annotation in file["annotations"]:
        x, y, width, height = annotation["bbox"]
        with Image.open(scenes / split / names[annotation["image_id"]]) as scene:
            box = (x - 3, y - 3, x + width + 3, y + height + 3)
            images.append(scene.convert("RGB").crop(box).resize((36, 36)))
        digits.append(annotation["category_id"] - 1)
    return images, np.array(digits)


def write_images(root: Path) -> None:
    """Write the images of all splits to a folder, as <split>/<class>/*.png."""
    with tempfile.TemporaryDirectory() as folder:
        scenes = Path(folder)
        write_scenes(scenes, train=1100, val=500)
        pools = {split: cut_out(scenes, split) for split in ("train", "val")}
    random = np.random.RandomState(0)
    order = {split: random.permutation(len(digits)) for split, (_, digits) in pools.items()}
    for split, count in COUNTS.items():
        pool = "val" if split == "test" else "train"
        images, digits = pools[pool]
        for name, is_rare, wanted in (("rare", True, count // 20), ("common", False, count)):
            wanted -= 0 if is_rare else count // 20
            chosen = [i for i in order[pool] if (digits[i] == RARE) == is_rare][:wanted]
            if len(chosen) < wanted:
                raise SystemExit(
                    f"the scenes have only {len(chosen)} of the {wanted} {name} images for {split}"
                )
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in chosen:
                images[i].save(folder / f"{i}.png")
            order[pool] = [i for i in order[pool] if i not in set(chosen)]


def compare(folder: Path) -> dict:
    """Select the learning rate, train with each setting and seed, and evaluate the test images."""
    images = folder / "images"
    if not images.is_dir():
        unfinished = folder / "images.new"  # of a run that was interrupted
        shutil.rmtree(unfinished, ignore_errors=True)
        write_images(unfinished)
        unfinished.rename(images)

    def train(name: str, fixed: dict, variants: dict, seeds: tuple[int, ...]) -> dict:
        config = "digits/vil_nano.yaml"
        return train_variants(config, folder / name, fixed, variants, seeds, data=images)

    rates = {f"rate {rate:g}": {"OPTIM.LR": rate} for rate in RATES}
    held_out = {name: row.metric for name, row in train("choice", FIXED, rates, (10,)).items()}
    chosen = max(held_out, key=held_out.get)
    rows = train("final", FIXED | rates[chosen], SETTINGS, SEEDS)
    return {
        "images": COUNTS,
        "seeds": SEEDS,
        "validation": held_out,
        "chosen": chosen,
        "balanced_accuracy": {name: row.tests for name, row in rows.items()},
    }


if __name__ == "__main__":
    compare_seeds(__doc__, "imbalance.json", compare, "balanced_accuracy")
