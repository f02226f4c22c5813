"""The detection task: loss, evaluation with COCO's average precision, inference.

`DetectionBatch` in data/batch.py describes the batches.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import pil_to_tensor

from vil.engine.distributed import compute_on_main, gather_objects
from vil.engine.evaluation import autocast, iter_in_step
from vil.engine.loop import Loss
from vil.tasks.base import AttentionInput, ImageMeta, Task, make_metric
from vil.tasks.detection import METRICS, coco_eval
from vil.tasks.detection.coco_eval import IOU_TYPES
from vil.tasks.detection.data.batch import to_unit_range
from vil.tasks.detection.data.masks import import_faster_coco_eval
from vil.tasks.detection.detections import Detections, from_output
from vil.tasks.detection.error_analysis import draw_worst
from vil.tasks.detection.output_formats import FORMATS, Prediction
from vil.tasks.detection.tiled_inference import detect, detect_tiled
from vil.tasks.detection.visualize import draw
from vil.utils.atomic_write import write_aside
from vil.utils.console import printable
from vil.utils.errors import SaveError, os_error_as
from vil.utils.json_text import to_json


class DetectionTask(Task):
    """Task for detectors of boxes and, optionally, masks.

    Models are called like torchvision's detectors. Each test set must be a `CocoDataset`. If
    `results_folder` is set, evaluation writes the predictions in COCO's format to `<test
    set>_bbox.json` and `<test set>_segm.json` in this folder.
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
        """Store the settings of the task.

        Args:
            masks: whether to evaluate masks as well as boxes.
            tile: side of the tiles in pixels; 0 to process each image at once.
            overlap, nms, per_image: settings for tiles, see `detect_tiled`.
            print_classes: whether `format_metrics` returns a table of per-class metrics.
            common: arguments of `Task`.

        Raises DataError if faster-coco-eval is not installed.
        """
        import_faster_coco_eval()  # fail now, not after the first epoch
        self.iou_types = ("bbox", "segm") if masks else ("bbox",)
        name = IOU_TYPES[self.iou_types[-1]]
        self.metric = make_metric(METRICS, f"{name}_ap")  # unless EVAL.METRIC is set
        super().__init__(**common)
        self.tiling = dict(tile=tile, overlap=overlap, nms=nms, per_image=per_image)
        self.print_classes = print_classes

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the sum of the model's losses in float32, and each of these losses as a metric."""
        losses = {name: loss.float() for name, loss in model(batch.images, batch.targets).items()}
        metrics = {name: loss.detach() for name, loss in losses.items()}
        return Loss(sum(losses.values()), metrics=metrics)

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """Evaluate a model in eval mode on the test set `name`, and return {metric: value}.

        The metrics are those of `coco_eval.average_precision`, and "count", the number of images.
        They are the same on all ranks. An unreadable image counts as an image without detections.
        between: function that is called before each batch.
        """
        dataset = self.test_sets[name].dataset
        all_results = gather_objects(self.collect_results(model, name, between))

        def compute() -> dict[str, Any]:
            results = coco_eval.sort_results(chain.from_iterable(all_results))
            self.write_results(name, results)
            return coco_eval.average_precision(dataset.annotations, results, self.iou_types)

        return {**compute_on_main(compute), "count": len(dataset)}

    def collect_results(
        self, model: nn.Module, name: str, between: Callable[[], None]
    ) -> list[dict]:
        """Run the model on this rank's images of the test set `name`, and return the detections.

        The detections are in COCO's results format, see `coco_eval.to_results`. between: function
        that is called before each batch, for example to check for a signal.
        """
        loader, results = self.test_sets[name], []
        category_ids = loader.dataset.category_ids
        for batch in iter_in_step(loader, between):
            batch = batch.to(self.device, self.memory_format)
            if self.tiling["tile"]:
                outputs = self.run(model, batch.images)
            else:
                with autocast(self.device, self.amp_dtype):
                    outputs = map(from_output, model(batch.images))
            for image, target, detections in zip(batch.images, batch.targets, outputs):
                size = tuple(image.shape[-2:])
                results += coco_eval.to_results(
                    detections, image_id=target["image_id"], size=size, category_ids=category_ids
                )
        return results

    def write_results(self, name: str, results: list[dict]) -> None:
        """Write detections to JSON files in `results_folder`, if this attribute is set.

        There is one file for boxes and, if masks are evaluated, one for masks. results: detections
        in COCO's results format. Raises SaveError if a file cannot be written.
        """
        if self.results_folder is None:
            return
        for iou_type in self.iou_types:
            file = self.results_folder / f"{name}_{iou_type}.json"
            with os_error_as(SaveError, f"{file} cannot be written"), write_aside(file) as aside:
                aside.write_text(to_json(coco_eval.select_results(results, iou_type)), "utf-8")

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Return the lines of a table of per-class metrics, or [] if `print_classes` is not set.

        name: name of the test set, which is ignored. metrics: result of `measure`.
        """
        if not self.print_classes:
            return []
        per_class = metrics["per_class"]
        classes = next(iter(per_class.values()))
        width = max(map(len, [*classes, "class"]))
        rows = {"class": [f"{name:>8}" for name in per_class]}
        for label in classes:
            rows[printable(label)] = [f"{values[label]:8.2f}" for values in per_class.values()]
        return [" ".join([f"  {label:{width}}", *cells]) for label, cells in rows.items()]

    def draw_worst(self, name: str, count: int, folder: Path) -> list[Path]:
        """Draw the `count` images with the most errors, and return the paths of the drawings.

        `evaluate` must be called first, with `results_folder` set. name: name of the test set.
        folder: folder for the drawings.
        """
        boxes, *masks = (
            json.loads((self.results_folder / f"{name}_{iou_type}.json").read_text("utf-8"))
            for iou_type in self.iou_types
        )
        rows = [{**box, **mask} for box, mask in zip(boxes, *masks)] if masks else boxes
        return draw_worst(self.test_sets[name].dataset, rows, count, folder, name)

    def preprocess(self, image: Image.Image) -> Tensor:
        """Convert an image to a tensor (3, H, W) uint8. The model resizes and normalizes it."""
        return pil_to_tensor(image)

    def attention_input(self, model: nn.Module, image: Image.Image) -> AttentionInput:
        transform, pixels = model.transform, self.preprocess(image).to(self.device)
        batch, _ = transform([to_unit_range(pixels)])  # resized, normalized and padded
        valid = torch.tensor(batch.image_sizes, device=self.device)
        height, width = batch.image_sizes[0]
        resized = batch.tensors[0, :, :height, :width].movedim(0, -1).cpu()
        shown = resized * torch.tensor(transform.image_std) + torch.tensor(transform.image_mean)
        shown = shown.clamp(0, 1).numpy()
        return AttentionInput(model.attention_body, batch.tensors, shown, valid)

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> list[Detections]:
        """Detect the objects in each image (3, H, W) separately, in tiles if `tile` is not 0."""
        images = [image.to(self.device) for image in inputs]
        with autocast(self.device, self.amp_dtype):
            if self.tiling["tile"]:
                return [detect_tiled(model, image, **self.tiling) for image in images]
            return [detect(model, image) for image in images]

    def postprocess(self, output: list[Detections], metas: Sequence[ImageMeta]) -> list[Prediction]:
        """Combine the detections in each image with its file name and size."""
        return [Prediction(*meta, detections) for meta, detections in zip(metas, output)]

    def failed(self, name: str, reason: str) -> Prediction:
        return Prediction(name, error=reason)

    def visualize(self, image: Image.Image, prediction: Prediction) -> Image.Image:
        """Draw boxes, classes, scores and masks onto a copy of the image."""
        return draw(image, prediction.detections, list(self.class_names))
