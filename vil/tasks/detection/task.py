"""The detection task: loss, evaluation with COCO's average precision, inference.

`DetectionBatch` in data/batch.py describes the batches.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import pil_to_tensor, resize

from vil.data.loader import TrainLoader
from vil.engine.distributed import DistInfo, compute_on_main, gather_objects, unwrap
from vil.engine.evaluation import autocast, evaluating, iter_in_step
from vil.engine.loop import Loss
from vil.export.exporter import SUFFIXES, Difference
from vil.layers.padding import downsample_valid
from vil.tasks.base import AttentionInput, ImageMeta, Task, TaskReport, make_metric
from vil.tasks.detection import METRICS, coco_eval
from vil.tasks.detection.coco_eval import IOU_TYPES
from vil.tasks.detection.data.batch import to_unit_range
from vil.tasks.detection.data.coco_json import given_ids, read_tables, to_source
from vil.tasks.detection.data.masks import import_faster_coco_eval
from vil.tasks.detection.detections import Detections, from_output
from vil.tasks.detection.distillation import PyramidDistillation
from vil.tasks.detection.error_analysis import draw_worst
from vil.tasks.detection.export import ExportedDetector, export_detector
from vil.tasks.detection.output_formats import FORMATS, Listing, Prediction, as_coco
from vil.tasks.detection.report import report_detections
from vil.tasks.detection.tiled_inference import detect, detect_tiled
from vil.tasks.detection.visualize import draw
from vil.utils.atomic_write import write_aside
from vil.utils.console import printable
from vil.utils.errors import ConfigError, DataError, SaveError, os_error_as
from vil.utils.json_text import to_json

logger = logging.getLogger(__name__)


class DetectionTask(Task):
    """Task for detectors of boxes and, optionally, masks.

    Models are called like torchvision's detectors; with a teacher, they must be those of
    `models.detectors`. Each test set must be a `CocoDataset`. If
    `results_folder` is set, evaluation writes the predictions in COCO's format to `<test
    set>_bbox.json` and `<test set>_segm.json` in this folder.
    """

    output_formats = FORMATS
    learned_keys = ("DETECTION.CATEGORY_IDS",)
    columns = ("loss", "box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75")

    def __init__(
        self,
        *,
        masks: bool,
        tile: int = 0,
        overlap: int = 0,
        nms: float = 0.5,
        per_image: int = 100,
        category_ids: Sequence[int] = (),
        print_classes: bool = False,
        distillation: PyramidDistillation | None = None,
        **common: Any,
    ):
        """Store the settings of the task.

        Args:
            masks: whether to evaluate masks as well as boxes.
            tile: side of the tiles in pixels; 0 to process each image at once.
            overlap, nms, per_image: settings for tiles, see `detect_tiled`.
            category_ids: category id of each label in the training annotation file; empty if
                unknown.
            print_classes: whether `format_metrics` returns a table of per-class metrics.
            distillation: mixes the loss with a distance from a teacher's pyramid; None: there is no
                teacher.
            common: arguments of `Task`.

        Raises DataError if faster-coco-eval is not installed.
        """
        import_faster_coco_eval()  # fail now, not after the first epoch
        self.iou_types = ("bbox", "segm") if masks else ("bbox",)
        name = IOU_TYPES[self.iou_types[-1]]
        self.metric = make_metric(METRICS, f"{name}_ap")  # unless EVAL.METRIC is set
        super().__init__(**common)
        self.tiling = dict(tile=tile, overlap=overlap, nms=nms, per_image=per_image)
        self.print_classes, self.distillation = print_classes, distillation
        self.category_ids = list(category_ids)
        coco = partial(as_coco, category_ids=self.category_ids, listings=self.list_test_images)
        self.output_formats = {**FORMATS, "coco": coco}

    def train_loader(self, dist: DistInfo, **options: Any) -> TrainLoader:
        """Build the training loader, see `Task.train_loader`, record the category ids, and load the
        teacher."""
        loader = super().train_loader(dist, **options)
        ids = list(loader.samples.dataset.category_ids)
        self.learned_settings = dict.fromkeys(self.learned_keys, ids)
        if self.distillation is not None and self.is_built:
            self.distillation.open()
        return loader

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the sum of the model's losses in float32, mixed with that of a teacher if there is
        one, and each of these losses as a metric."""
        teacher = self.distillation
        wanted = (teacher.levels(batch.images),) if teacher else ()
        losses = model(batch.images, batch.targets, *wanted)
        losses = {name: loss.float() for name, loss in losses.items()}
        metrics = {name: loss.detach() for name, loss in losses.items()}
        total = teacher.mix(losses) if teacher else sum(losses.values())
        return Loss(total, metrics=metrics)

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

        There is one file for boxes and, if masks are evaluated, one for masks. They have the image
        ids of the annotation file. results: detections in COCO's results format. Raises
        SaveError if a file cannot be written.
        """
        if self.results_folder is None:
            return
        ids = given_ids(self.test_sets[name].dataset.annotations)
        results = [{**row, "image_id": ids[row["image_id"]]} for row in results]
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
        dataset = self.test_sets[name].dataset
        numbers = {given: number for number, given in given_ids(dataset.annotations).items()}
        rows = [{**row, "image_id": numbers[row["image_id"]]} for row in rows]
        return draw_worst(dataset, rows, count, folder, name)

    def preprocess(self, image: Image.Image) -> Tensor:
        """Convert an image to a tensor (3, H, W) uint8. The model resizes and normalizes it."""
        return pil_to_tensor(image)

    def attention_input(self, model: nn.Module, image: Image.Image) -> AttentionInput:
        batch, valid = self.transform(model, self.preprocess(image))
        height, width = valid[0].tolist()
        mean, std = (
            torch.tensor(x) for x in (model.transform.image_mean, model.transform.image_std)
        )
        shown = batch[0, :, :height, :width].movedim(0, -1).cpu() * std + mean
        return AttentionInput(model.attention_body, batch, shown.clamp(0, 1).numpy(), valid)

    def transform(self, model: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Resize, normalize and pad an image (3, H, W), as the model does.

        Returns the batch (1, 3, H', W'), and its height and width without padding, (1, 2).
        """
        batch, _ = model.transform([to_unit_range(pixels.to(self.device))])
        return batch.tensors, torch.tensor(batch.image_sizes, device=self.device)

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

    def list_test_images(self) -> Iterator[Listing]:
        """Yield the images of each annotation file of DATA.TEST and DATA.VAL, for COCO's format.
        Logs a warning if the sets cannot be opened, and for a file that lists an image twice, which
        is left out."""
        if self.settings is None:
            return
        for part in ("test", "val") if self.settings.val else ("val",):
            try:
                loaders = self.test_loaders(DistInfo(), part=part)
            except (ConfigError, DataError) as error:
                logger.warning("the image ids are not those of a test set: %s", error)
                continue
            for dataset in (loader.dataset for loader in loaders.values()):
                source = to_source(dataset.annotations)
                if source.text is None:  # not converted from another format, without ids
                    rows = read_tables(source.path)["images"]
                    names = [os.path.normpath(row["file_name"]) for row in rows]
                    if len(set(names)) < len(names):
                        text = "the image ids are not those of %s, which lists an image twice"
                        logger.warning(text, source.path)
                        continue
                    ids = (row.get("given_id", row["id"]) for row in rows)
                    sizes = ((row["height"], row["width"]) for row in rows)
                    images = dict(zip(names, zip(ids, sizes)))
                    yield Listing(images, dataset.category_ids, source.path, dataset.folder)

    def embed(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Average the last feature map of the network before the feature pyramid, without padding.

        Returns (B, D) float32 on the CPU, D being the channels of the last stage.
        """
        rows, body = [], model.attention_body
        with autocast(self.device, self.amp_dtype):
            for pixels in inputs:
                batch, valid = self.transform(model, pixels)
                options = dict(intermediates_only=True, valid=valid)
                (last,) = body.forward_intermediates(batch, 1, **options)
                height, width = downsample_valid(valid, body.strides[-1])[0].tolist()
                rows.append(last[0, :, :height, :width].float().mean(dim=(1, 2)))
        return torch.stack(rows).cpu()

    def visualize(self, image: Image.Image, prediction: Prediction) -> Image.Image:
        """Draw boxes, classes, scores and masks onto a copy of the image."""
        return draw(image, prediction.detections, list(self.class_names))

    def export(
        self,
        model: nn.Module,
        path: Path,
        *,
        metadata: Mapping[str, str],
        format: str | None = None,
        size: tuple[int, int] | None = None,
        dynamic: Sequence[str] | None = None,
        opset: int | None = None,
    ) -> list[Difference]:
        """Write the model to an ONNX file for one image of a fixed size, see `export_detector`.

        size: height and width of the resized image; None for squares of DETECTION.INPUT.TEST_SIZE.
        Raises ConfigError for another format, and for dynamic dimensions.
        """
        if (format or SUFFIXES.get(path.suffix)) != "onnx":
            raise ConfigError(
                f"--out {path}: a detector can be exported only to ONNX, because its number of "
                "detections depends on the image: choose a name that ends in .onnx"
            )
        if dynamic:
            raise ConfigError(
                "a detector's file takes one image of a fixed size: leave out --dynamic, and set "
                "the size by --size"
            )
        transform = model.transform
        image = self.example_image(size or (transform.min_size[-1],) * 2)
        notes = {key: metadata[key] for key in ("task", "model", "classes") if key in metadata}
        if self.category_ids:
            notes["category_ids"] = json.dumps(self.category_ids)
        notes |= dict(test_size=str(transform.min_size[-1]), max_size=str(transform.max_size))
        return export_detector(model, path, image, opset=opset, metadata=notes)

    def load_exported(self, path: Path, format: str) -> nn.Module:
        return ExportedDetector(path)

    def example_image(self, size: tuple[int, int]) -> Tensor:
        """Return the first test image, resized to `size` (H, W), or noise if it cannot be read.

        The result is (1, 3, H, W) with values in 0..1.
        """
        try:
            image = self.preprocess(
                next(iter(self.test_loaders(DistInfo()).values())).dataset.image(0)
            )
        except (ConfigError, DataError, OSError) as error:
            logger.warning("the exported file is checked with noise, not a test image: %s", error)
            return torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))
        return to_unit_range(resize(image, list(size), antialias=True))[None]

    def report(self, model: nn.Module, class_names: Sequence[str], checkpoint: str) -> TaskReport:
        name, loader = next(iter(self.test_sets.items()))
        with evaluating(unwrap(model)) as plain:
            results = self.collect_results(plain, name, lambda: None)
        return report_detections(loader.dataset, results, self.iou_types, name, checkpoint)
