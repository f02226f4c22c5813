"""The task with one target per image: a class, a set of labels, or numbers.

Shapes: B images of a batch, c channels, K outputs of the model.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from vil.data import own_arguments
from vil.data.batch import Batch
from vil.data.dataset import ImageDataset
from vil.data.loader import TrainLoader
from vil.data.views import View, make_views
from vil.engine.distributed import (
    DistInfo,
    all_reduce_max,
    compute_on_main,
    gather_objects,
    unwrap,
)
from vil.engine.evaluation import autocast, evaluating, iter_in_step
from vil.engine.loop import Loss
from vil.export import export_model, load_exported
from vil.export.exporter import Difference
from vil.export.runtime import ExportedModel
from vil.integrations.optimize import OptimizedModel
from vil.models.features import pooled_features
from vil.tasks.base import ImageMeta, Task, TaskReport, make_metric
from vil.tasks.cost import model_cost
from vil.tasks.distillation.outputs import OutputDistillation
from vil.tasks.image.predictions import Prediction
from vil.tasks.image.target import BatchColumns, Outputs, Target, TestSet, merge
from vil.tasks.streamed_model import StreamedModel
from vil.utils.errors import DataError, as_config_error
from vil.utils.image_text import draw_text, enlarge, font_for
from vil.utils.memory import copy_to_device

MAX_EVAL_BATCH = 64  # images
LABEL_COLOR = (0, 0, 0)  # background of text in visualizations
# Largest number and smallest weight of classes that `format_target` names.
MAX_NAMED, MIN_NAMED = 4, 0.1


class ImageTask(Task):
    """Task for models that predict one target per image: a class, labels or numbers.

    Args:
        target: the kind of target, which computes the loss and the metrics.
        transform: evaluation transform, from a PIL image to a tensor (c, H, W).
        image_weights: weight of each training image in the loss, 1-dim; None: all weights are 1.
        crop_transform: evaluation transform for the square crops of test-time augmentation. It
            resizes a crop and must not crop further. None: use `transform`.
        distillation: mixes the loss with one of a teacher's outputs; None: there is no teacher.
        common: arguments of `Task`.

    kind: class of `target`, for a task that is built from a config.
    """

    kind: type[Target] = Target
    has_splits = True
    max_eval_batch = MAX_EVAL_BATCH
    own_arguments = staticmethod(own_arguments)
    cost = staticmethod(model_cost)

    def __init__(
        self,
        target: Target,
        *,
        transform: Callable[[Image.Image], Tensor] | None = None,
        crop_transform: Callable[[Image.Image], Tensor] | None = None,
        image_weights: Tensor | None = None,
        distillation: OutputDistillation | None = None,
        **common: Any,
    ):
        if not hasattr(self, "metric"):
            self.metric = make_metric(target.metrics)
        super().__init__(**common)
        self.target, self.target_type = target, target.target_type
        self.transform, self.crop_transform = transform, crop_transform or transform
        self.image_weights, self.distillation = target.to_device(image_weights), distillation
        target.check_weights(image_weights is not None)

    @classmethod
    def supports(cls, ability: str) -> bool:
        if ability == "calibrate":
            return hasattr(cls.kind, ability)
        return super().supports(ability)

    # ---- called by `vil.train` and by `vil data check`

    @as_config_error
    def train_loader(self, dist: DistInfo, **options: Any) -> TrainLoader:
        loader = super().train_loader(dist, **options)
        dataset = loader.samples.dataset
        weights = None if dataset.weights is None else torch.tensor(dataset.weights)
        self.image_weights = self.target.to_device(weights)
        self.learned_settings = self.target.read_targets(dataset)
        self.target.check_weights(weights is not None)
        if self.distillation is not None:
            # synthetic images of a dry run have other classes
            classes = loader.classes if options.get("dataset") is None else ()
            self.distillation.open(dataset, classes, load=self.is_built)
        return loader

    def count_classes(self, dataset: ImageDataset) -> dict[str, int]:
        return self.summarize_targets(dataset).counts

    def format_target(self, target: Tensor) -> str:
        """Convert the target of one image in a batch to text.

        For a class, the text is its name. For regression targets, it is their names and values. For
        labels or a soft target, both (K,), it is the classes with the largest values.
        """
        if target.ndim == 0:
            return self.class_names[int(target)]
        pairs = zip(target.tolist(), self.class_names)
        if self.target_type == "numbers":
            return ", ".join(f"{name} {value:.3g}" for value, name in pairs)
        largest = sorted(pairs, key=lambda pair: -pair[0])[:MAX_NAMED]
        return ", ".join(f"{name} {value:.2g}" for value, name in largest if value >= MIN_NAMED)

    # ---- called by the training loop and by evaluation

    def prepare(self, batch: Batch) -> Batch:
        return self.target.prepare(super().prepare(batch))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        outputs, weights = model(batch.images), self.image_weights
        if weights is not None:
            weights = weights[copy_to_device(batch.indices, self.device)]
        loss = self.target.loss(outputs, batch, weights)
        return self.distillation.mix(loss, outputs, batch) if self.distillation else loss

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        results = self.collect(model, name, between)

        def compute() -> dict[str, Any]:
            self.hint = self.hint or self.target.find_problem(name, results, self.label)
            return self.target.measure(name, results)

        return compute_on_main(compute)

    def collect(
        self, model: nn.Module, name: str, between: Callable[[], None] = lambda: None
    ) -> Any:
        """Run a model in eval mode on the test set `name`, and return what `Target.measure` needs.

        Rank 0 returns the results of all ranks, the others None. between: function that is called
        before each batch. Raises DataError, on all ranks, if no image can be read.
        """
        merged = self._collect(model, name, self.target.evaluate_batch, between)
        return self.target.gather(merged) if merged else None

    def _collect(
        self,
        model: nn.Module,
        name: str,
        evaluate_batch: Callable[[str, Tensor, Batch], BatchColumns],
        between: Callable[[], None],
    ) -> BatchColumns | None:
        rows = []
        for batch in iter_in_step(self.test_sets[name], between):
            batch = self.target.prepare_test(batch.to(self.device, self.memory_format))
            with autocast(self.device, self.amp_dtype):
                rows.append(evaluate_batch(name, model(batch.images), batch))
        if not all_reduce_max(len(rows)):
            raise DataError(
                f"cannot evaluate, because the test set {name} has no readable image: check its "
                "files with vil data check"
            )
        gathered = list(itertools.chain.from_iterable(gather_objects(rows)))
        return merge(gathered) if gathered else None

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        return self.target.format_metrics(self.test_sets[name].classes, metrics)

    def calibrate(self, model: nn.Module) -> dict[str, Any]:
        """Fit the calibration of the target, such as a temperature, on the first test set.

        Must be called before `apply_calibration`. Returns the same on all ranks.
        """
        name, loader = next(iter(self.test_sets.items()))
        keep_outputs = partial(Target.evaluate_batch, self.target)
        with evaluating(unwrap(model)) as plain:
            merged = self._collect(plain, name, keep_outputs, lambda: None)
        return compute_on_main(
            lambda: self.target.calibrate(name, loader, Outputs(*merged.columns))
        )

    def apply_calibration(self, calibration: Mapping[str, Any]) -> None:
        if self.supports("calibrate"):
            self.target.apply_calibration(calibration, self.class_names)

    # ---- called by inference

    def preprocess(self, image: Image.Image) -> Tensor:
        """Apply the evaluation transform to an image and return a tensor (c, H, W)."""
        return self.transform(image)

    def preprocess_views(self, image: Image.Image, views: Sequence[View]) -> Tensor:
        """Apply test-time augmentation to an image, and return its V views (V, c, H, W).

        views: the mirror images and crops to create, see `vil.data.views`.
        """
        return make_views(image, tuple(views), self.transform, self.crop_transform)

    def compute_outputs(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the decoded outputs (B, K) for images (B, c, H, W) on the device."""
        with autocast(self.device, self.amp_dtype):
            outputs = model(images).float()
        return self.target.decode(outputs)

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Return probabilities (B, K) float32 or numbers (B, K) float64, on the CPU, for B tensors
        (c, H, W)."""
        return self.target.activate(self.compute_outputs(model, self._stack(inputs)).cpu())

    def _stack(self, inputs: Sequence[Tensor]) -> Tensor:
        placement = dict(device=self.device, memory_format=self.memory_format)
        return torch.stack(list(inputs)).to(**placement, non_blocking=True)

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the mean of several outputs (B, K) of `run`, computed in float64."""
        mean = torch.stack([output.double() for output in outputs]).mean(dim=0)
        return mean.to(outputs[0].dtype)

    def for_ensemble(self, tasks: Sequence["ImageTask"]) -> "ImageTask":
        task = copy(self)
        task.target = self.target.average([each.target for each in tasks])
        return task

    def embed(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        return self.compute_features(model, self._stack(inputs)).cpu()

    def compute_features(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the pooled features (B, D) float32 of images (B, c, H, W), on the device."""
        if isinstance(model, OptimizedModel):
            return model.call(partial(pooled_features, model.model), images)
        with autocast(self.device, self.amp_dtype):
            return pooled_features(model, images).float()

    def export(
        self, model: nn.Module, path: Path, *, metadata: Mapping[str, str], **options: Any
    ) -> list[Difference]:
        """Write the model to a file that maps images (B, c, H, W) to logits (B, K) or, for numbers,
        to their values in the original units. The metadata have the activation of the outputs."""
        target = self.target
        metadata = {**metadata, "activation": target.activation}
        exported, output = target.for_export(model), target.output_name
        options |= dict(metadata=metadata, output=output, compared=target.encode)
        return export_model(exported, path, **options)

    def load_exported(self, path: Path, format: str) -> nn.Module:
        file = load_exported(path, format)
        return ExportedModel(lambda images: self.target.encode(file(images)), file.metadata)

    def label(self, index: int) -> str:
        """Return the name of a class, or its index as text if the model has no class names."""
        return self.class_names[index] if self.class_names else str(index)

    def stream_model(self, model: nn.Module) -> StreamedModel:
        return StreamedModel(self, model)

    def postprocess(self, output: Tensor, metas: Sequence[ImageMeta]) -> list[Prediction]:
        return self.target.predict(output, [meta.name for meta in metas], self.label)

    def failed(self, name: str, reason: str) -> Prediction:
        return self.target.prediction(name, error=reason)

    def add_target(self, prediction: Prediction, target: str) -> Prediction:
        return replace(prediction, target=target)

    def describe_target(self, dataset: ImageDataset, index: int) -> str:
        """Return the target of the image `index` as text: the name of the class, the names of the
        labels separated by "|", or the exact numbers separated by spaces."""
        target = dataset.targets[index]
        if dataset.target_type == "class":
            return dataset.classes[int(target)]
        if dataset.target_type == "labels":
            return "|".join(name for name, value in zip(dataset.classes, target) if value)
        short = [(value, f"{value:.9g}") for value in target]
        return " ".join(text if type(value)(text) == value else str(value) for value, text in short)

    def visualize(self, image: Image.Image, prediction: Prediction) -> Image.Image:
        """Write the prediction onto a copy of the image, which is enlarged if it is small."""
        canvas, _ = enlarge(image)
        pen, font, y = ImageDraw.Draw(canvas), font_for(canvas), 0
        for line in self.target.describe(prediction, self.label):
            y += draw_text(pen, 0, y, line, LABEL_COLOR, font)
        return canvas

    # ---- called by the report

    def report(self, model: nn.Module, class_names: Sequence[str], checkpoint: str) -> TaskReport:
        name, loader = next(iter(self.test_sets.items()))
        with evaluating(unwrap(model)) as plain:
            results = self.collect(plain, name)
        test_set = TestSet(name, loader.classes, loader.dataset)
        return self.target.report(results, test_set, class_names, checkpoint)
