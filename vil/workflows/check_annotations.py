"""Check an annotation file of a detection dataset."""

from pathlib import Path
from typing import TYPE_CHECKING

from vil.tasks import TASKS
from vil.utils.errors import as_config_error

if TYPE_CHECKING:
    from vil.tasks.detection.data.find_invalid import AnnotationCheck


def check_annotations(
    annotations: str | Path, images: str | Path | None = None
) -> "AnnotationCheck":
    """Check an annotation file in COCO format. Returns the invalid entries, the ways in which
    annotations do not fit their images, and a summary of the file.

    images: folder of the images. If it is given, images are reported too if they are missing or
    unreadable, or if their size differs from the annotation file.
    """
    as_config_error(TASKS.entry)("detection")  # raises ConfigError if the task is not installed
    from vil.tasks.detection.data.find_invalid import find_invalid

    return find_invalid(annotations, images)
