"""The segmentation task: loss, evaluation by counts of pixels, inference.

Shapes: B images, c channels, K classes, H W size of an image in pixels.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vil.data.batch import Batch
from vil.engine.distributed import all_reduce_max, compute_on_main, gather_objects, unwrap
from vil.engine.evaluation import autocast, evaluating, iter_in_step
from vil.engine.loop import Loss
from vil.export import export_model, load_exported
from vil.export.exporter import DYNAMIC, Difference
from vil.layers.padding import downsample_valid
from vil.models.vision_longformer import MsViT
from vil.tasks.base import ImageMeta, Task, TaskReport, make_metric
from vil.tasks.cost import CostRow, count_macs, external_cost, msvit_cost, num_params
from vil.tasks.distillation.outputs import OutputDistillation
from vil.tasks.segmentation import METRICS, metrics
from vil.tasks.segmentation.heads import resize
from vil.tasks.segmentation.losses import SegmentationLoss
from vil.tasks.segmentation.metrics import Counts
from vil.tasks.segmentation.predictions import (
    FORMATS,
    Prediction,
    decode_index,
    default_palette,
    draw_prediction,
    encode_index,
)
from vil.tasks.segmentation.report import draw_worst, report_segmentation
from vil.tasks.segmentation.windows import blend_windows
from vil.utils.console import printable
from vil.utils.errors import DataError, SaveError, os_error_as

WORST = 8  # images in the report


class Result(NamedTuple):
    """Counts of the pixels of a test set.

    counts: the sum over images. rows: (index of the image, its mIoU in percent, and the predicted
    classes as a PNG file, or b""), in the order of the test set.
    """

    counts: Counts
    rows: list[tuple[int, float, bytes]]


class SegmentationTask(Task):
    """Task for models that map images (B, c, H, W) to logits of each pixel (B, K, H, W).

    Each test set must be a `vil.tasks.segmentation.data.MaskDataset`.
    """

    output_formats = FORMATS
    has_splits = True
    max_eval_batch = 1  # images have different sizes
    resizes_to_image_size = False  # SEGMENTATION.TEST.SIZE decides
    columns = ("loss", *METRICS)
    counted = "pixels"
    learned_keys = ("SEGMENTATION.PALETTE",)

    def __init__(
        self,
        *,
        loss: SegmentationLoss,
        num_classes: int,
        transform: Callable[[Image.Image], Tensor] | None = None,
        test_size: int = 0,
        tile: int = 0,
        overlap: int = 0,
        boundary: int = 2,
        outputs: Sequence[str] = ("overlay",),
        palette: Sequence[int] = (),
        print_classes: bool = False,
        distillation: OutputDistillation | None = None,
        **common: Any,
    ):
        """Store the settings of the task.

        Args:
            loss: maps logits (B, K, H, W) and class numbers (B, H, W) to the loss.
            transform: evaluation transform, from a PIL image to a tensor (c, H, W).
            test_size: length in pixels to which `transform` resizes the shorter side; 0 for none.
            tile, overlap: side and overlap of windows in pixels; 0 for whole images.
            boundary: distance in pixels up to which boundaries agree, for boundary F1.
            outputs: what `visualize` draws, of `keys.OUTPUTS`.
            palette: red, green and blue of each class, one class after the other; empty: the
                default colors.
            print_classes: whether `format_metrics` returns a table of per-class metrics.
            distillation: mixes the loss with one of a teacher's outputs; None: there is no teacher.
            common: arguments of `Task`.
        """
        if not hasattr(self, "metric"):
            self.metric = make_metric(METRICS)
        super().__init__(**common)
        self.loss_function, self.num_classes = loss, num_classes
        self.transform, self.test_size = transform, test_size
        self.tiling = dict(tile=tile, overlap=overlap)
        self.boundary, self.outputs = boundary, tuple(outputs)
        self.print_classes, self.distillation = print_classes, distillation
        self.has_palette = len(palette) > 0
        self.palette = default_palette(num_classes)
        if self.has_palette:
            self.palette = np.array(palette, np.uint8).reshape(num_classes, 3)
        self._results: dict[str, Result] = {}  # of the last evaluation, on rank 0

    # ---- called by the training loop and by evaluation

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        outputs = model(batch.images)
        value, terms = self.loss_function(outputs, batch.targets.long())
        loss = Loss(value, metrics=terms if len(terms) > 1 else {})
        return self.distillation.mix(loss, outputs, batch) if self.distillation else loss

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        result = self.collect(model, name, between)

        def compute() -> dict[str, Any]:
            self._results[name] = result
            self._write(name, result.rows)
            return {
                **metrics.values(result.counts),
                "count": len(result.rows),
                "per_class": metrics.per_class(result.counts, self.test_sets[name].classes),
            }

        return compute_on_main(compute)

    def collect(
        self,
        model: nn.Module,
        name: str,
        between: Callable[[], None] = lambda: None,
        *,
        keep: bool = False,
    ) -> Result:
        """Run a model in eval mode on the test set `name`, and count the pixels on all ranks.

        Rank 0 returns the result of all ranks. It has the predicted classes if `keep` is True, or
        if rank 0 has a `results_folder`. between: function that is called before each batch.
        Raises DataError, on all ranks, if no image can be read.
        """
        counts, rows = Counts.zeros(self.num_classes), []
        is_kept = all_reduce_max(keep or self.results_folder is not None)
        for batch in iter_in_step(self.test_sets[name], between):
            batch = batch.to(self.device, self.memory_format)
            for image, truth, index in zip(batch.images, batch.targets, batch.indices.tolist()):
                predicted = self.compute_logits(model, image, tuple(truth.shape)).argmax(0)
                own = metrics.count(truth, predicted, self.num_classes, self.boundary)
                counts = counts + own
                file = encode_index(predicted.cpu().numpy(), self.palette) if is_kept else b""
                rows.append((index, metrics.values(own)["miou"], file))
        if not all_reduce_max(len(rows)):
            raise DataError(
                f"cannot evaluate, because the test set {name} has no readable image: check its "
                "files with vil data check"
            )
        gathered = gather_objects((counts, rows))
        total = sum((part for part, _ in gathered), Counts.zeros(self.num_classes))
        return Result(total, sorted(row for _, own in gathered for row in own))

    def compute_logits(
        self, model: nn.Module, image: Tensor, size: tuple[int, int] | None = None
    ) -> Tensor:
        """Return the logits (K, H, W) float32 of an image (c, h, w) on the device.

        size: (H, W), to which the logits are resized; None for (h, w).
        """

        def compute(part: Tensor) -> Tensor:
            with autocast(self.device, self.amp_dtype):
                return model(part[None])[0].float()

        if self.tiling["tile"]:
            logits = blend_windows(compute, image, **self.tiling)
        else:
            logits = compute(image)
        return logits if size is None else resize_logits(logits, size)

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Return the lines of a table of per-class metrics, or [] if `print_classes` is not set.

        name: name of the test set, which is ignored. metrics: result of `measure`.
        """
        if not self.print_classes:
            return []
        per_class = metrics["per_class"]
        classes = list(next(iter(per_class.values())))
        width = max(map(len, map(printable, [*classes, "class"])))
        lines = [" ".join([f"  {'class':{width}}", *(f"{column:>11}" for column in per_class)])]
        for label in classes:
            cells = [per_class[column][label] for column in per_class]
            texts = ["absent" if np.isnan(value) else f"{value:.2f}" for value in cells]
            row = " ".join(f"{text:>11}" for text in texts)
            lines.append(f"  {printable(label):{width}} {row}")
        return lines

    def draw_worst(self, name: str, count: int, folder: Path) -> list[Path]:
        """Draw the `count` images with the smallest mIoU, and return the paths of the drawings.

        `evaluate` must be called first, with `results_folder` set. name: name of the test set.
        folder: folder for the drawings.
        """
        worst = self._worst(name, count)
        return draw_worst(self.test_sets[name].dataset, worst, folder, name)

    def _worst(self, name: str, count: int) -> list[tuple[int, float, np.ndarray]]:
        """Return the `count` images with the smallest mIoU, as (index, mIoU, predicted classes)."""
        rows = [row for row in self._results[name].rows if not np.isnan(row[1])]
        worst = sorted(rows, key=lambda row: row[1:2])[:count]
        return [(index, miou, decode_index(file)) for index, miou, file in worst]

    def _write(self, name: str, rows: Sequence[tuple[int, float, bytes]]) -> None:
        """Write the predicted classes of each image of the test set `name` to `results_folder`, if
        this attribute is set: `<test set>/<name of the image>.png`."""
        if self.results_folder is None:
            return
        dataset = self.test_sets[name].dataset
        for index, _, content in rows:
            sample = Path(dataset.sample_name(index)).with_suffix(".png")
            file = self.results_folder / name / sample
            with os_error_as(SaveError, f"{file} cannot be written"):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)

    # ---- called by inference

    def preprocess(self, image: Image.Image) -> Tensor:
        """Apply the evaluation transform to an image, and return a tensor (c, H, W)."""
        return self.transform(image)

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits (K, H, W) float32 of each image (c, H, W), on the CPU."""
        placement = dict(device=self.device, non_blocking=True)
        return [self.compute_logits(model, image.to(**placement)).cpu() for image in inputs]

    def postprocess(self, output: list[Tensor], metas: Sequence[ImageMeta]) -> list[Prediction]:
        return [self._predict(logits, meta) for logits, meta in zip(output, metas)]

    def _predict(self, logits: Tensor, meta: ImageMeta) -> Prediction:
        logits = resize_logits(logits, meta.size)
        classes = logits.argmax(0).numpy().astype(np.int16)
        probabilities = None
        if "probabilities" in self.outputs:
            probabilities = logits.softmax(0).numpy().astype(np.float16)
        return Prediction(meta.name, meta.size, classes, self.palette, probabilities=probabilities)

    def failed(self, name: str, reason: str) -> Prediction:
        return Prediction(name, error=reason)

    def visualize(self, image: Image.Image, prediction: Prediction) -> Any:
        """Draw the prediction, see `draw_prediction`."""
        return draw_prediction(image, prediction, list(self.class_names), self.outputs)

    def embed(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Average the last map of the network before the head, without padding.

        Returns (B, D) float32 on the CPU, D being the channels of the last stage.
        """
        rows = []
        with autocast(self.device, self.amp_dtype):
            for image in inputs:
                images = image[None].to(self.device)
                last, stride = model.compute_maps(images)[-1], model.body.strides[-1]
                size = torch.tensor([image.shape[-2:]])
                height, width = downsample_valid(size, stride)[0].tolist()
                rows.append(last[0, :, :height, :width].float().mean(dim=(1, 2)))
        return torch.stack(rows).cpu()

    def export(
        self,
        model: nn.Module,
        path: Path,
        *,
        metadata: Mapping[str, str],
        size: tuple[int, int] | None = None,
        dynamic: Sequence[str] | None = None,
        **options: Any,
    ) -> list[Difference]:
        """Write the model to a file that maps images (B, c, H, W) to logits (B, K, H, W). The
        metadata have the transform of this task, and the activation of the logits.

        size: height and width of the images in pixels; None for squares of INPUT.IMAGE_SIZE.
        dynamic: dimensions that stay dynamic; None for all, with an MsViT for the size only. Raises
        ValueError for a dynamic batch with an MsViT and padded images, because full attention
        resizes its position bias to the size of each image.
        """
        size = size or (self.settings.image_size,) * 2
        masks, divisor = isinstance(model.body, MsViT), model.head.divisor
        if dynamic is None:
            dynamic = ("size",) if masks else DYNAMIC
        is_padded = "size" in dynamic or any(n % divisor for n in size)
        if masks and "batch" in dynamic and is_padded:
            raise ValueError(
                "a file of this model takes one image of any size or batches of one fixed size: "
                "set --dynamic size, or --dynamic batch and --size to multiples of "
                f"{divisor}, got --dynamic {','.join(dynamic)} and --size {size[0]}x{size[1]}"
            )
        unused = ("crop_pct", "interpolation")  # of classification
        metadata = {key: value for key, value in metadata.items() if key not in unused}
        metadata |= dict(activation="softmax", test_size=str(self.test_size))
        return export_model(model, path, metadata=metadata, size=size, dynamic=dynamic, **options)

    def load_exported(self, path: Path, format: str) -> nn.Module:
        return load_exported(path, format)

    # ---- called by the report and by `vil analyze`

    def cost(self, model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
        """Count the parameters and MACs of each stage of an MsViT, and of the head. A model with
        another network must be on the meta device, and gets a single row."""
        body, head = model.body, model.head
        if not isinstance(body, MsViT):
            return external_cost(model, size)
        height, width = (head.divisor * -(-side // head.divisor) for side in size)
        grids = [(height // stride, width // stride) for stride in body.strides]
        maps = [torch.empty(1, d, *grid, device="meta") for d, grid in zip(body.channels, grids)]
        macs = count_macs(copy.deepcopy(head).to("meta"), maps)[1]
        grid, channels = "{} x {}".format(*grids[0]), head.classifier.in_channels
        row = CostRow("head", "", grid, channels, num_params(head), macs)
        return [*msvit_cost(body, (height, width))[:-1], row]

    def report(self, model: nn.Module, class_names: Sequence[str], checkpoint: str) -> TaskReport:
        name, loader = next(iter(self.test_sets.items()))
        with evaluating(unwrap(model)) as plain:
            self._results[name] = self.collect(plain, name, keep=True)
        counts, worst = self._results[name].counts, self._worst(name, WORST)
        return report_segmentation(loader.dataset, counts, worst, name, checkpoint)


def resize_logits(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize logits (K, h, w) to `size` (H, W), bilinear without aligned corners."""
    return logits if tuple(logits.shape[-2:]) == tuple(size) else resize(logits[None], size)[0]
