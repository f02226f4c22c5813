"""Check an annotation file in COCO format: its contents, and what training would ignore.

  vil detect check /data/coco/annotations/instances_train2017.json
  vil detect check mine/train.json --images mine/train
  vil detect check mine/train.json --images mine/train --list faults.tsv

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

from vil.cli.arguments import files_read
from vil.utils.console import fit_to_terminal
from vil.utils.output_paths import output_file, replacing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("annotations", metavar="ANNOTATIONS", help="annotation file in COCO format")
    add("--images", metavar="DIR", help="folder of the images, to check the images too")
    add("--list", metavar="FILE", help="file to write all faults to, one per line")


def run(args: argparse.Namespace) -> int:
    from vil.workflows.check_annotations import check_annotations

    file = output_file(args.list, "--list", inputs=files_read(args, "list")) if args.list else None
    check = check_annotations(args.annotations, args.images)
    print(fit_to_terminal("\n".join([*check.summary, *check.list_faults(hint=not file)])))
    if file:
        with replacing(file, "--list") as aside:
            lines = ("\t".join(fault) + "\n" for fault in check.faults)
            aside.write_text("".join(lines), "utf-8", "replace")
    check.raise_if_unusable()
    return 0
