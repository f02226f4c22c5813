"""Classification without a config: the arguments of the task and of its targets in one call."""

from vil.tasks.image.classes import Classes
from vil.tasks.image.task import ImageTask

OF_TASK = (
    "amp_dtype", "memory_format", "test_sets", "results_folder", "transform", "image_weights",
)  # fmt: skip


class ClassificationTask(ImageTask):
    kind = Classes

    def __init__(self, *, device, num_classes, **options):
        common = {name: options.pop(name) for name in OF_TASK if name in options}
        super().__init__(Classes(num_classes, device=device, **options), device=device, **common)
