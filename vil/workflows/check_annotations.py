"""Check an annotation file of a detection set."""

from pathlib import Path

from vil.tasks.detection.data.find_invalid import AnnotationCheck, find_invalid


def check_annotations(annotations: str | Path, images: str | Path | None = None) -> AnnotationCheck:
    """Read a file in COCO's format; with `images`, a folder, read the head of each image, too."""
    return find_invalid(annotations, images)
