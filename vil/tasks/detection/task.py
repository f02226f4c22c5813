"""Detection: the detector's own losses, COCO's average precision, and inference.

A batch has `images` (a list of (3, H, W)), `targets` (a list of dicts), `indices` and
`to(device, memory_format)`; see data/batch.py.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import pil_to_tensor

from vil.engine.distributed import broadcast_object, gather_objects
from vil.engine.evaluation import autocast, iter_in_step
from vil.engine.loop import Loss, Metric
from vil.tasks.base import ImageMeta, Task
from vil.tasks.detection.coco_eval import (
    KINDS,
    average_precision,
    in_order,
    needed,
    of_kind,
    to_results,
)
from vil.tasks.detection.detections import Detections, from_output
from vil.tasks.detection.error_analysis import draw_worst
from vil.tasks.detection.output_formats import FORMATS, Shown
from vil.tasks.detection.tiled_inference import detect, detect_tiled
from vil.tasks.detection.visualize import draw
from vil.utils.atomic_write import write_aside
from vil.utils.errors import SaveError

log = logging.getLogger(__name__)


class DetectionTask(Task):
    """Boxes, with masks or without.

    A detector in training mode returns a dict of losses for (images, targets), and in evaluation
    mode a list of dicts for (images), as torchvision's do. Test sets are CocoDatasets. With
    `results_folder`, an evaluation writes predictions there in COCO's format: `<set>_bbox.json` and
    `<set>_segm.json`. tile, overlap: images are detected in tiles of so many pixels; tile 0: as a
    whole. nms, per_image: of detections merged from tiles. print_classes: `format_metrics` has a
    table of classes.
    """

    output_formats = FORMATS
    columns = (
        "loss",
        *(f"{kind}_{name}" for kind in KINDS.values() for name in ("ap", "ap50", "ap75")),
    )

    def __init__(
        self,
        *,
        masks: bool,
        tile: int = 0,
        overlap: int = 0,
        nms: float = 0.5,
        per_image: int = 100,
        print_classes: bool = False,
        **common: Any,
    ):
        needed()  # not after the first epoch
        super().__init__(**common)
        self.kinds = ("bbox", "segm") if masks else ("bbox",)
        name = KINDS[self.kinds[-1]]
        self.metric = Metric(f"{name}_ap", label=f"{name} AP", unit="%")
        self.tile, self.overlap = tile, overlap
        self.print_classes = print_classes
        self.limits = dict(nms=nms, per_image=per_image)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The sum of the detector's losses, and each of them, in fp32."""
        losses = {name: loss.float() for name, loss in model(batch.images, batch.targets).items()}
        return Loss(
            sum(losses.values()), metrics={name: loss.detach() for name, loss in losses.items()}
        )

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """{box_ap, .., count, per_class} in percent; see `average_precision`.

        Rank 0 computes them from the results of all ranks, in an order that does not depend on the
        ranks. count is the number of images; nothing is found in one that cannot be read.
        """
        dataset = self.test_sets[name].dataset
        all_results = gather_objects(self.collect_results(model, name, between))
        metrics = None
        if all_results:
            results = in_order(chain.from_iterable(all_results))
            self.write_results(name, results)
            metrics = average_precision(dataset.annotations, results, self.kinds)
        metrics = broadcast_object(metrics)
        return {**metrics, "count": len(dataset)}

    def collect_results(
        self, model: nn.Module, name: str, between: Callable[[], None]
    ) -> list[dict]:
        """Return this rank's results, on the host."""
        loader, results = self.test_sets[name], []
        for batch in iter_in_step(loader, between):
            batch = batch.to(self.device, self.memory_format)
            with autocast(self.device, self.amp_dtype):
                outputs = model(batch.images)
            for image, target, output in zip(batch.images, batch.targets, outputs):
                results += to_results(
                    from_output(output),
                    image_id=target["image_id"],
                    size=tuple(image.shape[-2:]),
                    category_ids=loader.dataset.category_ids,
                )
        return results

    def write_results(self, name: str, results: list[dict]) -> None:
        """Write the results of a test set, one file per kind, if there is a folder for them.

        Raises SaveError where they cannot be written.
        """
        if self.results_folder is None:
            return
        for kind in self.kinds:
            file = self.results_folder / f"{name}_{kind}.json"
            try:
                with write_aside(file) as aside:
                    aside.write_text(json.dumps(of_kind(results, kind)), encoding="utf-8")
            except OSError as error:
                raise SaveError(f"{file} cannot be written: {error.strerror or error}") from error

    def check_test_classes(self, learned: Sequence[str]) -> None:
        """Warn where categories, which are matched by the order of their ids, have other names."""
        for name, test in self.test_sets.items():
            pairs = zip(learned, test.classes)
            other = next((pair for pair in pairs if pair[0] != pair[1]), None)
            if other:
                log.warning(
                    "the categories of %s are not called as those of training, the first %r there "
                    "and %r here: they are matched by the order of their ids",
                    name,
                    *reversed(other),
                )

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """A line per class: its name and its metrics, in columns."""
        if not self.print_classes:
            return []
        per_class = metrics["per_class"]
        classes = next(iter(per_class.values()))
        width = max(map(len, [*classes, "class"]))
        lines = [" ".join([f"  {'class':{width}}", *(f"{name:>8}" for name in per_class)])]
        for label in classes:
            values = (f"{of_class[label]:8.2f}" for of_class in per_class.values())
            lines.append(" ".join([f"  {label:{width}}", *values]))
        return lines

    def draw_worst(self, name: str, count: int, folder: Path) -> list[Path]:
        """Draw the images of a test set with most mistakes, from the results that were written."""
        boxes, *masks = (
            json.loads((self.results_folder / f"{name}_{kind}.json").read_text("utf-8"))
            for kind in self.kinds
        )
        rows = [{**box, **mask} for box, mask in zip(boxes, *masks)] if masks else boxes
        return draw_worst(self.test_sets[name].dataset, rows, count, folder, name)

    def preprocess(self, image: Image.Image) -> Tensor:
        """(3, H, W) uint8; the model resizes and normalizes it."""
        return pil_to_tensor(image)

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> list[Detections]:
        """Detect objects in each image by itself, whole or in tiles."""
        images = [image.to(self.device) for image in inputs]
        with autocast(self.device, self.amp_dtype):
            if not self.tile:
                return [detect(model, image) for image in images]
            tiles = dict(tile=self.tile, overlap=self.overlap)
            return [detect_tiled(model, image, **tiles, **self.limits) for image in images]

    def postprocess(self, output: list[Detections], metas: Sequence[ImageMeta]) -> list[Shown]:
        """The objects of each image."""
        return [Shown(meta.name, meta.size, found) for meta, found in zip(metas, output)]

    def failed(self, name: str, reason: str) -> Shown:
        """The prediction of an image that cannot be read."""
        return Shown(name, error=reason)

    def visualize(self, image: Image.Image, prediction: Shown) -> Image.Image:
        """Draw boxes, classes, scores and masks; a small image comes out larger."""
        return draw(image, prediction.found, list(self.class_names))
