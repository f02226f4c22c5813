"""Evaluate weights on the test sets.

  vil evaluate --run runs/nano                    the best checkpoint, with the run's config
  vil evaluate --run runs/nano --checkpoint last
  vil evaluate --run runs/nano --part val         the sets in DATA.VAL instead of DATA.TEST
  vil evaluate --config-file imagenet/vil_small.yaml --data DIR MODEL.MODEL_PATH best.pth
  vil evaluate --run runs/nano OUTPUT_PERCLASS_ACC True
  vil evaluate MODEL.MODEL_PATH nano.safetensors DATA.TEST digits       a file of vil convert
  vil evaluate --run runs/nano --calibrate        fit a temperature, and store it in the run
  vil evaluate --run runs/scenes --pictures 20    a detector; draw the 20 worst images
  torchrun --nproc_per_node=8 -m vil evaluate --run-dir runs/coco

Prints the metrics and writes them to OUTPUT_DIR/eval/results.json. Weights other than the best
checkpoint of a run have a folder of their own in the run, such as eval/step-00000220. Random
weights are never evaluated.

For a classifier, the metrics are the loss and, in percent:

  top1                        accuracy
  top5                        top-5 accuracy, if there are more than five classes
  balanced_accuracy, macro_precision, macro_recall, macro_f1    means over classes
  auroc, average_precision    of one class against the others, for up to 100 classes
  ece                         expected calibration error

With OUTPUT_PERCLASS_ACC True, a line is printed for each class. It begins with the number of
correct predictions and the number of images. docs/guides/metrics.md explains the metrics.

--calibrate calibrates the probabilities by temperature scaling: it fits a divisor of the logits on
the first set in DATA.VAL, or in DATA.TEST if DATA.VAL is empty, and writes it to
RUN/calibration.json. `vil evaluate` and `vil predict` use it for the same checkpoint.

For a detector, the metrics are COCO's, in percent:

  box_ap              average precision, a mean over IoU 0.50 to 0.95
  box_ap50, box_ap75  average precision at IoU 0.50 and 0.75
  box_ap_s            box_ap of small objects, up to 32 x 32 pixels
  box_ap_m            box_ap of medium objects, up to 96 x 96 pixels
  box_ap_l            box_ap of large objects
  box_ar100           average recall with at most 100 detections per image
  mask_...            the same metrics for masks
  miou                mean over classes of the intersection over union of pixels
  pixel_accuracy      share of the pixels whose class is right
  mean_accuracy       mean over classes of this share
  fw_iou              IoU, weighted by the number of pixels of each class
  boundary_f1         F1 of boundary pixels, mean over classes

A metric is nan (null in results.json) if the test set has no object to which it applies. A
detector's predictions are written to OUTPUT_DIR/eval in COCO's results format: <set>_bbox.json and
<set>_segm.json. Those of a segmentation model are PNG files of class numbers, in the folder <set>.

--pictures N draws the N images with the most errors next to their ground truth, the worst first, in
OUTPUT_DIR/eval/pictures. Only detections with a score of at least 0.5 count. A detection matches an
object if both have the same class and their IoU is at least 0.5. An error is an object without a
matching detection, or a detection without a matching object. For a segmentation model, these are
the images with the lowest mIoU, next to their truth and their prediction.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from vil.cli.arguments import (
    at_least,
    config_arguments,
    fast_argument,
    run_arguments,
    with_weights,
)
from vil.utils.plural import plural

if TYPE_CHECKING:
    from vil.workflows.evaluate import EvaluationResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    run_arguments(parser)
    fast_argument(parser)
    text = "draw the N images with the most errors of each test set (0); detectors only"
    about = "calibrate the probabilities of --run's checkpoint first; classifiers only"
    parser.add_argument("--calibrate", action="store_true", help=about)
    parser.add_argument("--pictures", type=at_least(0), default=0, metavar="N", help=text)

    text = (
        "test: the sets in DATA.TEST (default); val: those in DATA.VAL, which selected the weights"
    )
    parser.add_argument("--part", default="test", choices=["test", "val"], help=text)


def run(args: argparse.Namespace) -> int:
    from vil.workflows.evaluate import evaluate_config

    options = dict(num_worst=args.pictures, part=args.part, calibrate=args.calibrate)
    print_evaluation(evaluate_config(*with_weights(args), **options), calibrate=args.calibrate)
    return 0


def print_evaluation(result: "EvaluationResult", *, calibrate: bool = False) -> None:
    """Print the result of an evaluation. calibrate: whether the command calibrated the
    probabilities, rather than read a stored calibration."""
    from vil.utils.console import fit_to_terminal
    from vil.utils.metric_format import format_pairs

    if result.folder is None:  # only rank 0 prints
        return
    print(fit_to_terminal(result.report))
    for line in result.calibration:
        file = sys.stdout if calibrate else sys.stderr
        print(fit_to_terminal(line, file=file), file=file)
    for name, metrics in result.metrics.items():
        shown = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        print(fit_to_terminal(f"{result.part} set {name} {format_pairs(shown)}"))
        for line in result.lines[name]:
            print(line)
    for images in result.images.values():
        shown = plural(len(images), "image")
        print(f"{shown} with the most errors: see {result.folder / 'pictures'}")
