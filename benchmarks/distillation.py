"""Train ViL-Nano without labels, from DINOv2 or on masked images, and compare with neither.

  python benchmarks/distillation.py              about 75 minutes on two cores
  python benchmarks/distillation.py --seeds 1 --minutes 1 0.5    a short trial

Needs the extras `dinov2` and `geo`. The images are the tiles of benchmarks/earth_tiles.py. The
student learns the features of the ViT-S/14 `dinov2_small` from all tiles of the training part, with
the recipe own/distill_vil_nano_96.yaml, or the pixels of masked squares, with
own/simmim_vil_nano_96.yaml. Then it is fine-tuned on a tenth of the labeled training tiles, with
own/vil_nano_96.yaml. The rivals are trained from nothing on the same tenth: in the same time as
both steps together, the teacher's included, and in the time of fine-tuning. The
number of epochs is that of --minutes at the speed of short runs. Each seed draws another tenth. A
linear probe is fitted to the features of the tenth. Figures are top-1 in percent on the test part,
of the last checkpoint; medians over seeds.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from earth_tiles import IMAGES, corners, write_tile, write_tiles
from shared import (
    CPU,
    RESULTS,
    add_json,
    last_top1,
    make_parser,
    seconds_per_epoch,
    train_apart,
    write_json,
)

from vil.tasks.segmentation.layouts import read_earth
from vil.utils.machine import machine
from vil.utils.text_table import align
from vil.workflows.configure import make_config
from vil.workflows.embed import probe

PRETRAINING = {  # {start: recipe}
    "distilled": "own/distill_vil_nano_96.yaml",
    "masked images": "own/simmim_vil_nano_96.yaml",
}
STARTS = (*PRETRAINING, "from nothing", "from nothing, short")
TUNE = "own/vil_nano_96.yaml"
TENTH = 10
MINUTES = (6.0, 1.5)  # of pretraining with the teacher's time, of fine-tuning
SHORT = 3  # epochs of a short run, of which the first may compute the teacher's features


def draw_tenth(root: Path, seed: int) -> Path:
    """Copy a tenth of the labeled training tiles of each class, and all test tiles."""
    few = root / f"few{seed}"
    shutil.copytree(root / "labeled/val", few / "val")
    for folder in sorted((root / "labeled/train").iterdir()):
        files = sorted(folder.iterdir())
        chosen = np.random.RandomState(seed).permutation(len(files))[: len(files) // TENTH]
        (few / "train" / folder.name).mkdir(parents=True)
        for i in chosen:
            shutil.copy(files[i], few / "train" / folder.name)
    return few


def probed(run: Path, data: Path) -> float:
    """Return the top-1 of a linear probe of a run's features."""
    words = [f"MODEL.MODEL_PATH={run}/checkpoints/last", f"DATA.PATH={data}"]
    *_, linear = probe(make_config(TUNE, words)).probes
    return next(iter(linear.top1.values()))


def measure(args: argparse.Namespace, root: Path) -> None:
    counts = write_tiles(root / "labeled", IMAGES)
    image, _ = read_earth()
    (root / "all/train").mkdir(parents=True)
    for left, top in corners("train"):
        write_tile(image, left, top, root / "all/train")
    shutil.copytree(root / "labeled/val", root / "all/val")
    unlabeled = len(list((root / "all/train").iterdir()))
    images = {start: [f"DATA.PATH={root / 'all'}"] for start in PRETRAINING}
    images["distilled"].append(f"DISTILL.CACHE={root / 'cache'}")
    few = [draw_tenth(root, seed) for seed in range(args.seeds)]
    own = seconds_per_epoch(train_apart(TUNE, root / "speed-few", 40, f"DATA.PATH={few[0]}"))
    seconds = {"epoch of a tenth": statistics.median(own)}
    pretrain, tune = (60 * minutes for minutes in args.minutes)
    lengths = {
        "from nothing, short": max(1, int(tune / seconds["epoch of a tenth"])),
        "from nothing": max(1, int((pretrain + tune) / seconds["epoch of a tenth"])),
    }
    for start in filter(PRETRAINING.get, args.starts):
        folder = root / f"speed {start}"
        run = train_apart(PRETRAINING[start], folder, SHORT, *images[start])
        first, *others = seconds_per_epoch(run)
        seconds |= {f"{start}, first epoch": first, f"{start}, epoch": statistics.median(others)}
        left = pretrain - first
        lengths[start] = 1 + max(0, int(left / seconds[f"{start}, epoch"]))
    print(unlabeled, "tiles without labels;", counts, lengths, flush=True)
    rows = []
    for seed, tenth in enumerate(few):
        data, drawn = f"DATA.PATH={tenth}", f"SEED={seed}"
        for start in args.starts:
            folder, options, epochs = root / f"{start} {seed}", [data, drawn], lengths[start]
            if start in PRETRAINING:
                run = train_apart(PRETRAINING[start], folder, epochs, *images[start], drawn)
                options += [f"MODEL.MODEL_PATH={run}/checkpoints/last", "FINETUNE.HEAD=new"]
                tuned = train_apart(
                    TUNE, root / f"tuned {start} {seed}", lengths[STARTS[-1]], *options
                )
            else:
                run = tuned = train_apart(TUNE, folder, epochs, *options)
            figures = {"top1": last_top1(tuned), "probe": probed(run, tenth)}
            rows.append({"start": start, "seed": seed, **figures})
            print(rows[-1], flush=True)
    table = [["start", "fine-tuned", "linear probe"]]
    for name in args.starts:
        found = [row for row in rows if row["start"] == name]
        table.append([name, *(f"{statistics.median(r[k] for r in found):.2f}" for k in figures)])
    print(align(table))
    result = {"machine": machine(CPU), "tiles": counts, "unlabeled": unlabeled}
    result |= {"seconds": seconds, "epochs": lengths, "minutes": args.minutes, "rows": rows}
    write_json(args.json, json.loads(json.dumps(result)))


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_json(parser, RESULTS / "distillation.json")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (3)")
    parser.add_argument(
        "--minutes", type=float, nargs=2, default=MINUTES,
        help="of pretraining with the teacher's time, and of fine-tuning (6 and 1.5)",
    )  # fmt: skip
    parser.add_argument(
        "--starts", nargs="*", default=STARTS, choices=STARTS, metavar="START",
        help=f"those to measure: {', '.join(STARTS)} (all)",
    )  # fmt: skip
    parser.add_argument("--keep", metavar="DIR", help="keep the runs in this folder")
    args = parser.parse_args()
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as place:
        measure(args, Path(place))
