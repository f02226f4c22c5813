"""Base class of tasks, such as classification and detection.

A task is a subclass of `Task` with an entry in the registry TASKS, and is created by
task_class(cfg, device). The training loop, evaluation, inference, the report and the commands call
only methods of `Task`. A method that a task does not define is a workflow that it does not support.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from vil.data.build import DataSettings
from vil.data.classes import match_classes
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.target_summary import TargetSummary, summarize_targets
from vil.data.views import View
from vil.engine.distributed import DistInfo, unwrap
from vil.engine.evaluation import evaluating
from vil.engine.loop import Loss, Metric
from vil.report.html import Html
from vil.tasks import TASKS
from vil.tasks.cost import CostRow
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.plural import plural
from vil.utils.registry import Entry

Datasets = Mapping[str, Dataset] | None
Metrics = Mapping[str, tuple[str, str, bool]]  # {name: (label, unit, higher is better)}
Drawing = Image.Image | np.ndarray  # an array is written to a .npy file
OutputFormat = Callable[[Iterable[Any], Sequence[str]], Iterator[str]]
SPLIT_KEYS = ("VAL", "VAL_FRACTION", "TEST_FRACTION", "FOLDS")  # of the section DATA


class ImageMeta(NamedTuple):
    """The file name of an image, and its size before any transform."""

    name: str
    size: tuple[int, int]  # (height, width) in pixels


class OpenData(NamedTuple):
    """The loaders of a config's datasets.

    train: loader of the training set. tests: {part: {name of the test set: loader}}, where part is
    "val" or "test", see `Task.test_loaders`. note: text that tells the user how these datasets
    differ from those of a training run, or "".
    """

    train: TrainLoader
    tests: Mapping[str, Mapping[str, EvalLoader]]
    note: str = ""


class AttentionInput(NamedTuple):
    """What `vil visualize attention` draws for an image.

    network: the part of the model that has the attention layers. batch: its input (1, c, H, W).
    image: this input without padding as an RGB image, an array (H, W, 3) of values from 0 to 1.
    valid (1, 2): height and width of `image`; None if the input is not padded. caption: the model's
    prediction as text, or "".
    """

    network: nn.Module
    batch: Tensor
    image: np.ndarray
    valid: Tensor | None = None
    caption: str = ""


class TaskReport(NamedTuple):
    """A task's content for the run report: cards (title, value, remark) and HTML sections."""

    cards: Sequence[tuple[str, str, str]] = ()
    sections: Sequence[Html] = ()


def make_metric(metrics: Metrics, name: str = "") -> Metric:
    """Return the metric `name`, by default the first one.

    metrics: all metrics of a task, {name: (label, unit, whether higher is better)}.
    """
    name = name or next(iter(metrics))
    label, unit, higher_is_better = metrics[name]
    return Metric(name, higher_is_better, label, unit)


def trains_batch_norm(model: nn.Module) -> bool:
    """Return whether a model has a batch norm with parameters that are trained."""
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return any(p.requires_grad for norm in norms for p in norm.parameters())


class Task:
    """Base class of all tasks. Methods that it does not implement raise NotImplementedError.

    The class attributes say what a task is like:

    metric: the checkpoint with the best value of this metric on the first test set is `best`.
    output_formats: {name: function} for `vil predict --format`. The first one is the default. A
    function takes predictions and the class names, and yields chunks of text.
    complete_formats: the formats that output all classes, to which --top and --threshold do not
    apply.
    learned_keys: config keys that are empty until the training data determine their values.
    resizes_to_image_size: whether the network takes batches of images of INPUT.IMAGE_SIZE pixels.
    has_splits: whether the task supports the config keys in SPLIT_KEYS, such as DATA.VAL.
    `open_test_set` then has a second argument, the split to open: "val" or "test".
    max_eval_batch: maximum batch size in evaluation. Each rank has batches of max_eval_batch or
    DATALOADER.BSZ images, whichever is smaller, so metrics do not depend on the number of ranks.
    None: the ranks divide DATALOADER.BSZ among them.
    """

    metric: Metric
    output_formats: Mapping[str, OutputFormat] = {}
    complete_formats: Sequence[str] = ()
    learned_keys: Sequence[str] = ()
    resizes_to_image_size = True
    has_splits = False
    max_eval_batch: int | None = None
    has_batch_norm = False  # of the model that `build_model` returned, see `trains_batch_norm`
    is_built = False  # whether `build_model` was called, so that the task may train
    accepts_any_classes = False  # whether the number of classes may differ from DATA.NUM_CLASSES
    class_names: Sequence[str] = ()  # of the model; set before datasets are opened
    # config values that `train_loader` derived from the training set, for the run's config.yaml
    learned_settings: Mapping[str, Any] = {}
    columns: Sequence[str] = ()  # metrics in the report's table of evaluations; empty: all
    cost_remark = ""  # for the report, if the cost of one image is not a number
    counted = "images"  # what `count_classes` counts
    hint = ""  # advice after the last evaluation, for the log of a run; set on rank 0

    def __init__(
        self,
        *,
        device: torch.device,
        settings: DataSettings | None = None,
        metric: str = "",
        amp_dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        test_sets: Mapping[str, EvalLoader] | None = None,
        results_folder: Path | None = None,
    ):
        """Store the settings of the task.

        Args:
            settings: the config's settings of the datasets and loaders that this class builds; None
                for a task that builds them itself, or gets them as arguments.
            metric: EVAL.METRIC; "" for the attribute `metric` of the class or, if it has none, the
                first metric of the task's registry entry.
            amp_dtype: the dtype of autocast; None for full precision.
            test_sets: {name: loader} of the test sets for `evaluate`. The method `test_loaders`
                replaces them.
            results_folder: folder to which `evaluate` writes predictions; None: do not write them.
        """
        self.device, self.amp_dtype, self.memory_format = device, amp_dtype, memory_format
        self.test_sets = dict(test_sets or {})
        self.results_folder = results_folder
        self.settings = settings
        if settings is None:
            return
        given = {key: getattr(settings, key.lower()) for key in SPLIT_KEYS}
        if not self.has_splits and (used := [f"DATA.{key}" for key in given if given[key]]):
            raise ConfigError(
                f"TASK {settings.task} does not support {' or '.join(used)}, because it always "
                "evaluates all images of the sets in DATA.TEST: remove this setting"
            )
        declared = TASKS.entry(settings.task).facts.get("metrics", {})
        if declared and (metric or not hasattr(self, "metric")):
            self.metric = make_metric(declared, metric)

    @classmethod
    def supports(cls, ability: str) -> bool:
        """Return whether the task has an ability: a method that it defines, or a class attribute
        that is neither None nor False. The default of a method in `Task` does not count."""
        value = getattr(cls, ability, None)
        if callable(value):
            return value is not getattr(Task, ability, None)
        return value is not None and value is not False

    # ---- built from the config

    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        """Build the network with its head, and with modules that are used only in training.

        The weights are initialized from SEED. load_pretrained: load published weights if MODEL.ARCH
        is a torchvision or timm model and MODEL.PRETRAINED is set.
        """
        raise NotImplementedError

    def inference_model(self, model: nn.Module) -> nn.Module:
        """Return the model without modules that are used only in training."""
        return model

    def load_weights(self, model: nn.Module, path: Path, *, strict: bool) -> Any:
        """Load a weight file into the model, and return a report of what was loaded.

        strict: raise CheckpointError if the file lacks weights of some parameters. Otherwise, these
        keep their initial values. Weights that do not fit the model always raise CheckpointError.
        """
        raise NotImplementedError

    def open_train_set(self) -> Dataset:
        """Open the training set of the config. `train_loader` calls this method."""
        raise NotImplementedError

    def open_test_set(self, name: str, *split: str) -> Dataset:
        """Open a test set of the config. `test_loaders` calls this method. split: see
        `has_splits`; left out for "val"."""
        raise NotImplementedError

    def own_arguments(self, name: str) -> list[str]:
        """Return the keys of DATA.KWARGS that the dataset `name` accepts."""
        raise NotImplementedError

    def train_loader(
        self, dist: DistInfo, *, bad_file: Path | None = None, dataset: Dataset | None = None
    ) -> TrainLoader:
        """Build this rank's training loader.

        dist: rank and number of ranks. bad_file: file to which the names of unreadable images are
        appended. dataset: dataset to use instead of the config's training set. Raises ConfigError
        if the model, built before, has batch norms that would see one image at a time.
        """
        size = self.settings.batch_size
        is_synchronized = self.device.type == "cuda"  # see `vil.engine.distributed.wrap`
        if self.has_batch_norm and size == (1 if is_synchronized else dist.world):
            raise ConfigError(
                f"DATALOADER.BSZ {size} is one image per process, and batch norms need several "
                f"images: set DATALOADER.BSZ to at least {2 * size}, or use a model without batch "
                "norms"
            )

        def open_dataset() -> Dataset:
            if dataset is not None:
                return dataset
            self.settings.check_arguments(self.own_arguments)
            opened = self.open_train_set()
            self._check(opened, "the training set", match=bool(self.class_names))
            return opened

        return self.settings.train_loader(dist, self.device, open_dataset, bad_file)

    @as_config_error
    def test_loaders(
        self,
        dist: DistInfo,
        *,
        bad_file: Path | None = None,
        datasets: Datasets = None,
        part: str = "val",
    ) -> dict[str, EvalLoader]:
        """Build this rank's loader of each test set, and return {name: loader}.

        The loaders are also stored in `test_sets`.

        Args:
            bad_file: file to which the names of unreadable images are appended.
            datasets: {name: dataset} to use instead of the config's test sets.
            part: "test" for the sets in DATA.TEST; "val" for those in DATA.VAL or, if it is empty,
                in DATA.TEST. The best checkpoint is selected on "val" sets.
        """
        settings = self.settings
        if datasets is None:
            settings.check_arguments(self.own_arguments)
        key = "VAL" if part == "val" and settings.val else "TEST"
        split = ["test"] if key == "TEST" and settings.val else []

        def open_dataset(name: str) -> Dataset:
            opened = self.open_test_set(name, *split)
            self._check(opened, name)
            return opened

        options = dict(datasets=datasets, max_batch=self.max_eval_batch, key=key)
        self.test_sets = settings.test_loaders(dist, self.device, open_dataset, bad_file, **options)
        return self.test_sets

    def _check(self, dataset: Any, name: str, *, match: bool = True) -> None:
        """Reorder the classes of a dataset to match the model's, and read one of its images.

        match: whether to reorder the classes. If DATA.TARGETMAP is set, they are never reordered.
        name: name of the dataset, for messages. Raises DataError if the classes to reorder are not
        the classes of the model.
        """
        with suppress(OSError, AttributeError, IndexError):
            dataset.image(0)  # logs warnings about images once, not in every loader worker
        if match and not self.settings.targetmap:
            by_position = self.settings.classes == "by_position"
            match_classes(dataset, self.class_names, name, by_position=by_position)

    def check_num_classes(self, dataset: Any, name: str) -> None:
        """Raise ConfigError unless a dataset has DATA.NUM_CLASSES classes.

        If DATA.NUM_CLASSES is "auto" or the attribute `accepts_any_classes` is True, the check is
        skipped. name: name of the dataset, for the error message.
        """
        wanted, count = self.settings.num_classes, len(dataset.classes)
        if not self.accepts_any_classes and wanted not in ("auto", count):
            raise ConfigError(
                f"DATA.NUM_CLASSES is {wanted}, but {name} has "
                f"{plural(count, 'class', 'classes')}: change DATA.NUM_CLASSES, or use another "
                "dataset"
            )

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> Dataset:
        """Build a dataset of `num_samples` synthetic images for --dry-run and benchmarks.

        The images are as large as the largest images in training. folder: folder for files that
        the dataset writes. split: "train" or "val".
        """
        raise NotImplementedError

    @contextmanager
    def open_data(self) -> Iterator[OpenData]:
        """Context manager that opens the config's datasets, to check and describe them.

        Raises ConfigError or DataError if the datasets are invalid.
        """
        loader = self.train_loader(DistInfo())
        self.class_names = self.class_names or loader.classes
        tests = {"val": self.test_loaders(DistInfo())}
        if self.supports("open_test_set") and self.settings.val:
            tests["test"] = self.test_loaders(DistInfo(), part="test")
        yield OpenData(loader, tests)

    def count_classes(self, dataset: Dataset) -> dict[str, int]:
        """Count the images, or in detection the objects, of each class of a dataset.

        Returns {class name: count}, or {} if the dataset has no classes.
        """
        return {}

    def describe_images(self, dataset: Dataset) -> str:
        """Return a remark about the images of a dataset, such as those it omits; "" for none."""
        return ""

    def draw_batch(self, batch: Any) -> list[tuple[Image.Image, str]]:
        """Convert a batch to PIL images, to show the model's input after augmentation.

        batch: result of `prepare`. Returns a list of (image, target as text), or [] if the task
        does not support this.
        """
        return []

    # ---- called by `vil data check`

    @as_config_error
    def open_split(self, name: str | None = None, part: str = "val") -> Any:
        """Open a dataset of the config, even if it does not have DATA.NUM_CLASSES classes.

        name: name of a test set; None for the training set. part: see `test_loaders`. The dataset
        has the methods `image` and `sample_name` of `ImageDataset`. Raises DataError if the dataset
        is invalid.
        """
        if not self.supports("open_train_set"):
            if name is None:
                return self.train_loader(DistInfo()).samples.dataset
            return self.test_loaders(DistInfo(), part=part)[name].dataset
        self.settings.check_arguments(self.own_arguments)
        split = ["test"] if part == "test" else []
        self.accepts_any_classes = True
        try:
            return self.open_train_set() if name is None else self.open_test_set(name, *split)
        finally:
            del self.accepts_any_classes

    def summarize_targets(self, dataset: Any) -> TargetSummary:
        """Summarize the targets of a dataset, such as the number of images of each class.

        dataset: result of `open_split`.
        """
        return summarize_targets(dataset)

    def find_misfits(self, dataset: Any, indices: np.ndarray, sizes: np.ndarray) -> list[Any]:
        """Return the ways in which the targets of a dataset do not fit its images.

        indices (n,): images that were opened. sizes (n, 2): their width and height. Each item is a
        text, as a string or by str(), with the attribute `is_common`, whether so many do not fit
        that the dataset cannot be used for training, and optionally `stops_evaluation`, whether the
        same holds for evaluation.
        """
        return []

    # ---- called by the training loop and by evaluation

    def prepare(self, batch: Any) -> Any:
        """Move a training batch to the device, and apply augmentations that run on the device."""
        return batch.to(self.device, self.memory_format)

    def split(self, batch: Any, num_parts: int) -> list[Any]:
        """Split a batch into `num_parts` batches of equal size, for gradient accumulation."""
        samples = len(batch.indices)
        size = samples // num_parts
        message = f"{samples} images do not divide into {num_parts} equal parts"
        assert size * num_parts == samples > 0, message
        parts = [slice(start, start + size) for start in range(0, samples, size)]
        names = ("images", "targets", "indices")
        return [replace(batch, **{n: getattr(batch, n)[part] for n in names}) for part in parts]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of a batch, and metrics for the training log.

        batch: result of `prepare`. The caller must enable autocast.
        """
        raise NotImplementedError

    def evaluate(
        self, model: nn.Module, between: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, Any]]:
        """Evaluate the model on each test set and return {name of the test set: metrics}.

        The metrics are the same on every rank and do not depend on the number of ranks. between:
        function that is called before each batch.
        """
        self.hint = ""
        with evaluating(unwrap(model)) as plain:
            return {name: self.measure(plain, name, between) for name in self.test_sets}

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """Return the metrics of a model in eval mode on the test set `name`.

        between: function to call before each batch. An implementation must get its batches from
        `vil.engine.evaluation.iter_in_step(self.test_sets[name], between)`, which calls `between`
        equally often on all ranks.
        """
        raise NotImplementedError

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Return additional lines of text to print after the metrics of the test set `name`.

        The lines are, for example, a table of per-class metrics. metrics: result of `measure`.
        """
        return []

    def calibrate(self, model: nn.Module) -> dict[str, Any]:
        """Fit a calibration, such as a temperature or thresholds, on the first test set.

        Returns the calibration as a dict that can be saved as JSON, or {} if the task does not
        support calibration.
        """
        return {}

    def apply_calibration(self, calibration: Mapping[str, Any]) -> None:
        """Apply a calibration to all later outputs.

        calibration: result of `calibrate`, or {} to remove the current calibration.
        """

    def draw_worst(self, name: str, count: int, folder: Path) -> list[Path]:
        """Draw the `count` images with the most errors in the test set `name`.

        Writes the drawings to files in `folder`, and returns the paths of the files. `evaluate`
        must be called first.
        """
        raise NotImplementedError

    # ---- called by inference

    def preprocess(self, image: Image.Image) -> Tensor:
        """Convert an RGB image to an input tensor for `run`."""
        raise NotImplementedError

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Any:
        """Compute the model's output for a batch of preprocessed images."""
        raise NotImplementedError

    def postprocess(self, output: Any, metas: Sequence[ImageMeta]) -> list[Any]:
        """Convert the output of `run` to one prediction per image."""
        raise NotImplementedError

    def preprocess_views(self, image: Image.Image, views: Sequence[View]) -> Sequence[Tensor]:
        """Apply test-time augmentation to an RGB image, and return one input for `run` per view.

        views: the mirror images and crops to create.
        """
        raise NotImplementedError

    def average_outputs(self, outputs: Sequence[Any]) -> Any:
        """Average several outputs of `run` for the same images.

        The outputs are those of several views of the images in test-time augmentation, or those of
        several models in an ensemble. A task that defines this method and `preprocess_views`
        supports test-time augmentation and ensembles.
        """
        raise NotImplementedError

    def limit_classes(self, top: int | None = 5, threshold: float = 0.0) -> None:
        """Limit the classes in a prediction, if the task predicts classes.

        top: maximum number of classes; None: no limit. threshold: minimum probability of a class.
        """

    def for_ensemble(self, tasks: Sequence["Task"]) -> "Task":
        """Return a task whose `postprocess` converts the averaged outputs of an ensemble.

        tasks: one task per model of the ensemble, `self` first. This base class returns `self`.
        """
        return self

    def add_target(self, prediction: Any, target: str) -> Any:
        """Return a copy of a prediction that also has the ground-truth target of its image.

        target: the target as text.
        """
        raise NotImplementedError

    def describe_target(self, dataset: Any, index: int) -> str | None:
        """Return the ground-truth target of the image `index` as text, for `add_target`.

        dataset: one of `open_test_set`. Returns None if predictions have no ground-truth target.
        """
        return None

    def embed(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Compute the pooled features of B preprocessed images, without the model's head.

        Returns (B, D) float32 on the CPU. `vil embed` requires this method.
        """
        raise NotImplementedError

    def attention_input(self, model: nn.Module, image: Any) -> AttentionInput:
        """Prepare an image to draw what the tokens of the model attend to.

        model: in eval mode. image: an image of a dataset, or one that was read from a file. `vil
        visualize attention` requires this method.
        """
        raise NotImplementedError

    def stream_model(self, model: nn.Module) -> Any:
        """Return a `vil.tasks.streamed_model.StreamedModel`, which `vil predict --stream` requires.

        model: in eval mode. Raises ConfigError if it cannot be streamed.
        """
        raise NotImplementedError

    def export(self, model: nn.Module, path: Path, **options: Any) -> list[Any]:
        """Write the model to a file, see `vil.export.export_model`.

        options: its arguments `format`, `size`, `dynamic`, `opset` and `metadata`. `vil export`
        requires this method, and for its flag --check also `load_exported`.
        """
        raise NotImplementedError

    def load_exported(self, path: Path, format: str) -> nn.Module:
        """Load a file that `export` wrote, as a model for `evaluate`."""
        raise NotImplementedError

    def failed(self, name: str, reason: str) -> Any:
        """Return a prediction that reports an unreadable image.

        name: file name of the image. reason: why the image cannot be read.
        """
        raise NotImplementedError

    def visualize(self, image: Image.Image, prediction: Any) -> Drawing | Mapping[str, Drawing]:
        """Draw a prediction onto a copy of its image.

        A task with several drawings returns {end of the file name: drawing}, such as {"": image,
        "-classes": another image}. Raises ConfigError if the task does not support this.
        """
        raise ConfigError(
            f"the task {type(self).__name__} cannot draw predictions: leave out --output"
        )

    # ---- called by the report and by `vil analyze`

    def report(self, model: nn.Module, class_names: Sequence[str], checkpoint: str) -> TaskReport:
        """Evaluate the model on the first test set, and return content for the run report.

        class_names: the model's classes. checkpoint: description of the checkpoint, for the report.
        """
        return TaskReport()

    def cost(self, model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
        """Count the parameters and multiply-accumulates of each part of the model, such as a stage.

        size: (height, width) of the image in pixels. The model may be on the meta device.
        """
        raise NotImplementedError


REQUIRED = ("build_model", "load_weights", "train_loader", "test_loaders", "loss", "measure")
# {required method: a method that may be defined instead}
INSTEAD = {
    "train_loader": "open_train_set",
    "test_loaders": "open_test_set",
    "measure": "evaluate",
}


def check_task(task: Any, entry: Entry) -> None:
    """Raise ValueError unless `task` is a subclass of Task that defines the methods in REQUIRED, or
    those in INSTEAD. entry: registry entry of the task."""
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ValueError(
            f"task {entry.name!r} must be a subclass of vil.tasks.base.Task, but it is {task!r}"
        )
    missing = [
        name
        for name in REQUIRED
        if not task.supports(name) and not task.supports(INSTEAD.get(name, name))
    ]
    if missing:
        raise ValueError(
            f"task {entry.name!r} ({task.__name__}) must define the methods {', '.join(missing)}"
        )
