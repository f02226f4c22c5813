"""Average precision of a detector on the test sets.

  vil detect evaluate --run runs/scenes                    the best checkpoint, with its own config
  vil detect evaluate --run runs/scenes --checkpoint last
  vil detect evaluate --run runs/scenes OUTPUT_PERCLASS_ACC True         every class, too
  vil detect evaluate --run runs/scenes --pictures 20
  vil detect evaluate --config-file coco/mask_rcnn_vil_tiny_1x.yaml --data DIR MODEL.MODEL_PATH best
  torchrun --nproc_per_node=8 -m vil detect evaluate --run-dir runs/coco

Prints COCO's figures in percent: box_ap is the mean over IoU 0.50 to 0.95, box_ap50 and box_ap75
are those of one IoU, _s _m _l those of small, medium and large objects (below 32 x 32 pixels, below
96 x 96, others), box_ar100 the recall of 100 detections per image; mask_... the same of masks. What
the set has no object of has no figure: nan, in results.json null.

Writes OUTPUT_DIR/eval/results.json, and what was found in COCO's results format: <set>_bbox.json
and <set>_segm.json. --pictures N draws the N pictures with most mistakes beside their truth, the
worst first, into OUTPUT_DIR/eval/pictures. A mistake is an object without a detection of its class
with a score from 0.5 and an IoU from 0.5, and a detection with such a score without an object.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, resolve
from vil.cli.detect_train import of_detector
from vil.cli.evaluate import learned_classes, of_weights, ready, run_arguments, tell, write_results
from vil.cli.output import written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    run_arguments(parser)
    parser.add_argument(
        "--pictures",
        type=at_least(0),
        default=0,
        metavar="N",
        help="draw the N pictures of each set with most mistakes (0)",
    )


def at_least(smallest: int):
    """A whole number from `smallest` up, for argparse."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {smallest} up, got {text!r}"
            )
        return int(text)

    return number


def run(args: argparse.Namespace) -> int:
    of_weights(args)
    return evaluate(of_detector(resolve(args)), learned_classes(args), args.pictures)


def evaluate(cfg: CfgNode, learned: Sequence[str] = (), pictures: int = 0) -> int:
    """Load MODEL.MODEL_PATH, evaluate, print and write figures and results, draw pictures."""
    from vil.build_data import warn_of_names

    with ready(cfg) as (task, model, report, folder):
        warn_of_names(learned, task.test_loaders)
        task.results_folder = folder
        results = task.evaluate(model)
        if folder is None:
            return 0
        print(report)
        for name, figures in results.items():
            tell(name, figures)
            if cfg.OUTPUT_PERCLASS_ACC:
                print("\n".join(table(figures["per_class"])))
        write_results(folder, results)
        for name in results if pictures else ():
            draw(folder, name, task, pictures)
    return 0


def table(per_class: dict[str, dict[str, float]]) -> list[str]:
    """A line per class: its name and its figures, in columns."""
    classes = next(iter(per_class.values()))
    wide = max(map(len, [*classes, "class"]))
    lines = [" ".join([f"  {'class':{wide}}", *(f"{name:>8}" for name in per_class)])]
    for name in classes:
        figures = (f"{of_class[name]:8.2f}" for of_class in per_class.values())
        lines.append(" ".join([f"  {name:{wide}}", *figures]))
    return lines


def draw(folder: Path, name: str, task: Any, count: int) -> None:
    """The worst pictures of a test set, from the results that were written."""
    from vil.tasks.detection.error_analysis import draw_worst

    boxes, *masks = (
        json.loads((folder / f"{name}_{kind}.json").read_text("utf-8")) for kind in task.kinds
    )
    rows = [{**box, **mask} for box, mask in zip(boxes, *masks)] if masks else boxes
    pictures = folder / "pictures"
    with written(pictures, "OUTPUT_DIR"):
        drawn = draw_worst(task.test_loaders[name].dataset, rows, count, pictures, name)
    print(f"{len(drawn)} pictures in {pictures}")
