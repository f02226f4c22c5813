"""Check boxes and masks: their contents, and what training would ignore.

  vil detect check photos
  vil detect check /data/coco/annotations/instances_train2017.json
  vil detect check mine/train.json --images mine/train
  vil detect check mine/train.json --images mine/train --list faults.tsv

The first form takes a folder in the layout of COCO, Roboflow, YOLO (with data.yaml) or Pascal VOC,
and checks the annotations and images of each split. The others take an annotation file in COCO
format.

Prints the numbers of images, boxes, masks and categories, and up to twelve examples of each type of
fault, such as boxes that reach beyond their image. --list writes all faults to a file, one per
line: what is faulty (such as "annotation 7"), TAB, file name of the image, TAB, reason. --images
also checks that each image exists and has the size given in the annotation file. This check follows
all symbolic links, but training only accepts links to images below DATA.PATH or below a folder in
DATA.KWARGS.extra_roots. The exit code is 0 if training would only skip or report the faulty
annotations and images, and 3 if the file cannot be used for training, for example because most
boxes do not fit their images.
"""

import argparse
import os

from vil.cli.arguments import files_read
from vil.utils.console import fit_to_terminal
from vil.utils.output_paths import output_file, replacing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("annotations", metavar="PATH", help="folder of a dataset, or annotation file of COCO")
    add("--images", metavar="DIR", help="folder of the images of a file, to check the images too")
    add("--list", metavar="FILE", help="file to write all faults to, one per line")


def run(args: argparse.Namespace) -> int:
    from vil.workflows.check_annotations import check_annotations

    file, inputs = None, files_read(args, "list")
    if args.list:
        data = args.images or (args.annotations if os.path.isdir(args.annotations) else None)
        file = output_file(args.list, "--list", inputs=inputs, data=data)
    checks = check_annotations(args.annotations, args.images)
    for check in checks.values():
        print(fit_to_terminal("\n".join([*check.summary, *check.list_faults(hint=not file)])))
    if file:
        with replacing(file, "--list") as aside:
            faults = [fault for check in checks.values() for fault in check.faults]
            lines = ("\t".join(fault) + "\n" for fault in faults)
            aside.write_text("".join(lines), "utf-8", "replace")
    for split, check in checks.items():
        check.raise_if_unusable(split)
    return 0
