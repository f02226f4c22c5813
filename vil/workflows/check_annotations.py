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
    """Check a file in COCO's format and, with `images`, the headers of the images in a folder."""
    as_config_error(TASKS.entry)("detection")  # raises for a package without this task
    from vil.tasks.detection.data.find_invalid import find_invalid

    return find_invalid(annotations, images)
