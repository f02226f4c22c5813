"""Check the annotations of a detection dataset."""

from pathlib import Path
from typing import TYPE_CHECKING

from vil.tasks import TASKS
from vil.utils.errors import as_config_error

if TYPE_CHECKING:
    from vil.tasks.detection.data.find_invalid import AnnotationCheck

YAML = (".yaml", ".yml")


def check_annotations(
    annotations: str | Path, images: str | Path | None = None
) -> "dict[str, AnnotationCheck]":
    """Check an annotation file in COCO format, or a folder with a dataset in COCO's, YOLO's or
    Pascal VOC's layout. Returns {split: check}, where a check has the invalid entries, the ways in
    which annotations do not fit their images, and a summary of the split.

    annotations: an annotation file, whose split is called "train", or the folder of a dataset, or
    its data.yaml. images: folder of the images of an annotation file. If it is given, images are
    reported too if they are missing or unreadable, or if their size differs from the annotation
    file. The images of a folder are always checked.
    """
    as_config_error(TASKS.entry)("detection")  # raises ConfigError if the task is not installed
    from vil.tasks.detection.data.find_invalid import find_invalid, find_invalid_in_folder

    path = Path(annotations)
    folder = path.parent if path.suffix in YAML else path
    if images is None and folder.is_dir():
        return find_invalid_in_folder(folder)
    return {"train": find_invalid(annotations, images)}
