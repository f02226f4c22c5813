"""Detection: the detector's losses, evaluation by COCO's average precision, inference.

See `DetectionBatch` in data/batch.py for batches.
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
from vil.tasks.detection import coco_eval
from vil.tasks.detection.coco_eval import IOU_TYPES
from vil.tasks.detection.data.masks import import_faster_coco_eval
from vil.tasks.detection.detections import Detections, from_output
from vil.tasks.detection.error_analysis import draw_worst
from vil.tasks.detection.output_formats import FORMATS, Prediction
from vil.tasks.detection.tiled_inference import detect, detect_tiled
from vil.tasks.detection.visualize import draw
from vil.utils.atomic_write import write_aside
from vil.utils.errors import SaveError

log = logging.getLogger(__name__)


class DetectionTask(Task):
    """Boxes and optional masks.

    A detector in training mode returns a dict of losses for (images, targets), and in eval mode a
    list of dicts for (images), as torchvision's do. Test sets are CocoDatasets. With
    `results_folder`, evaluation writes predictions there in COCO's format: `<set>_bbox.json` and
    `<set>_segm.json`.
    """

    output_formats = FORMATS
    columns = ("loss", "box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75")

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
        """tile, overlap, nms, per_image: of `detect_tiled`; tile 0: detect in the full image.
        print_classes: include a table of classes in `format_metrics`."""
        import_faster_coco_eval()  # fail now, not after the first epoch
        super().__init__(**common)
        self.iou_types = ("bbox", "segm") if masks else ("bbox",)
        name = IOU_TYPES[self.iou_types[-1]]
        self.metric = Metric(f"{name}_ap", label=f"{name} AP", unit="%")
        self.tiling = dict(tile=tile, overlap=overlap, nms=nms, per_image=per_image)
        self.print_classes = print_classes

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Sum the detector's losses in fp32."""
        losses = {name: loss.float() for name, loss in model(batch.images, batch.targets).items()}
        metrics = {name: loss.detach() for name, loss in losses.items()}
        return Loss(sum(losses.values()), metrics=metrics)

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """Compute `average_precision` and count, the number of images.

        Rank 0 evaluates the sorted results of all ranks. An unreadable image has no detections.
        """
        dataset = self.test_sets[name].dataset
        all_results = gather_objects(self.collect_results(model, name, between))
        metrics = None
        if all_results:
            results = coco_eval.sort_results(chain.from_iterable(all_results))
            self.write_results(name, results)
            metrics = coco_eval.average_precision(dataset.annotations, results, self.iou_types)
        return {**broadcast_object(metrics), "count": len(dataset)}

    def collect_results(
        self, model: nn.Module, name: str, between: Callable[[], None]
    ) -> list[dict]:
        """Return this rank's results, on the CPU."""
        loader, results = self.test_sets[name], []
        category_ids = loader.dataset.category_ids
        for batch in iter_in_step(loader, between):
            batch = batch.to(self.device, self.memory_format)
            with autocast(self.device, self.amp_dtype):
                outputs = model(batch.images)
            for image, target, output in zip(batch.images, batch.targets, outputs):
                size, detections = tuple(image.shape[-2:]), from_output(output)
                results += coco_eval.to_results(
                    detections, image_id=target["image_id"], size=size, category_ids=category_ids
                )
        return results

    def write_results(self, name: str, results: list[dict]) -> None:
        """Write one file per IoU type to `results_folder`, if set. Raises SaveError."""
        if self.results_folder is None:
            return
        for iou_type in self.iou_types:
            file = self.results_folder / f"{name}_{iou_type}.json"
            try:
                with write_aside(file) as aside:
                    aside.write_text(
                        json.dumps(coco_eval.select_results(results, iou_type)), "utf-8"
                    )
            except OSError as error:
                raise SaveError(f"{file} cannot be written: {error.strerror or error}") from error

    def check_test_classes(self, learned: Sequence[str]) -> None:
        """Warn if categories, which are matched in the order of their ids, have other names."""
        for name, test in self.test_sets.items():
            pairs = zip(test.classes, learned)
            other = next((pair for pair in pairs if pair[0] != pair[1]), None)
            if other:
                there, here = other
                log.warning(
                    f"the categories of {name} are not called as those of training, the first "
                    f"{there!r} there and {here!r} here: they are matched by the order of their ids"
                )

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Format a table of classes and their metrics, if requested."""
        if not self.print_classes:
            return []
        per_class = metrics["per_class"]
        classes = next(iter(per_class.values()))
        width = max(map(len, [*classes, "class"]))
        rows = {"class": [f"{name:>8}" for name in per_class]}
        for label in classes:
            rows[label] = [f"{values[label]:8.2f}" for values in per_class.values()]
        return [" ".join([f"  {label:{width}}", *cells]) for label, cells in rows.items()]

    def draw_worst(self, name: str, count: int, folder: Path) -> list[Path]:
        """Draw the images of a test set with most errors, from the results of `evaluate`."""
        boxes, *masks = (
            json.loads((self.results_folder / f"{name}_{iou_type}.json").read_text("utf-8"))
            for iou_type in self.iou_types
        )
        rows = [{**box, **mask} for box, mask in zip(boxes, *masks)] if masks else boxes
        return draw_worst(self.test_sets[name].dataset, rows, count, folder, name)

    def preprocess(self, image: Image.Image) -> Tensor:
        """Convert to (3, H, W) uint8; the model resizes and normalizes."""
        return pil_to_tensor(image)

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> list[Detections]:
        """Detect objects image by image."""
        images = [image.to(self.device) for image in inputs]
        with autocast(self.device, self.amp_dtype):
            if self.tiling["tile"]:
                return [detect_tiled(model, image, **self.tiling) for image in images]
            return [detect(model, image) for image in images]

    def postprocess(self, output: list[Detections], metas: Sequence[ImageMeta]) -> list[Prediction]:
        """Add file names and sizes."""
        return [Prediction(*meta, detections) for meta, detections in zip(metas, output)]

    def failed(self, name: str, reason: str) -> Prediction:
        return Prediction(name, error=reason)

    def visualize(self, image: Image.Image, prediction: Prediction) -> Image.Image:
        """Draw boxes, classes, scores and masks."""
        return draw(image, prediction.detections, list(self.class_names))
