"""Benchmark several ways, such as ONNX or bfloat16, to run models for inference on a CPU."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from yacs.config import CfgNode

from vil.bench.deploy import PATHS, PLAIN, Row, Subject, compare_paths
from vil.bench.deploy_plot import plot_accuracy_and_speed
from vil.builders.device import configure_device
from vil.builders.model import prepare_for_evaluation
from vil.config import diff, override
from vil.ops.tuning import tuning_cache
from vil.tasks import refuse_without, task_for, with_num_classes
from vil.tasks.base import Task
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.lookup import lookup
from vil.workflows import configure
from vil.workflows.benchmark_results import ResultFolder
from vil.workflows.config_from_weights import ATTENTION, SETTINGS
from vil.workflows.inference import load_model, open_test_sets, recorded_classes
from vil.workflows.quantization_images import (
    MOST,
    find_calibration_images,
    iter_calibration_batches,
    iter_inputs,
)

# Published top-1 on ImageNet, in percent, at 224 pixels, after training on ImageNet-1k alone. The
# values of ViL are from table 4 of arXiv 2103.15358. The others are from timm's file
# results/results-imagenet.csv. levit_256 was trained with distillation.
PUBLISHED = {
    "vil_tiny": 76.3,
    "vil_tiny_rpb": 76.65,
    "vil_small": 82.0,
    "vil_small_rpb": 82.39,
    "timm/deit_tiny_patch16_224": 72.2,
    "timm/deit_small_patch16_224": 79.9,
    "timm/swin_tiny_patch4_window7_224": 81.4,
    "timm/convnext_tiny": 82.1,
    "timm/efficientvit_b1": 79.3,
    "timm/efficientvit_b2": 82.2,
    "timm/levit_256": 81.5,
    "timm/tiny_vit_11m_224": 81.5,
}
PLAIN_CPU = ["DEVICE=cpu", "AMP.ENABLED=False", "MODEL.COMPILE=False", "EVAL.FAST=False"]


class DeploySettings(NamedTuple):
    """Settings of a `DeployBenchmark`. A path is one way to run a model for inference.

    paths: names of paths, such as "onnx+int8"; keys of `vil.bench.deploy.PATHS`.
    rounds: number of measurements of each path at each batch size.
    images: number of test images on which each path is compared with eager mode.
    least_agreement: minimum percentage of these images with the same predicted class. A path below
    it is not timed.
    calibration: folder of images for static int8 quantization; None for training images.
    """

    paths: Sequence[str]
    batches: Sequence[int] = (1, 16)
    rounds: int = 9
    images: int = 512
    least_agreement: float = 97.0
    calibration: str | None = None


class DeployBenchmark:
    """Benchmark of several ways to run models for inference on the CPU.

    cfg: config of the main model. If it sets no weights, they are random, and only speed and memory
    are measured. name: name of this model in the results. class_names: its classes; by default
    those recorded with the weights. beside: other models to measure with random weights, as values
    of MODEL.ARCH.

    Raises ConfigError for an unknown name in `settings.paths`, and for unusable calibration images.
    """

    @as_config_error
    def __init__(
        self,
        cfg: CfgNode,
        name: str,
        settings: DeploySettings,
        *,
        class_names: Sequence[str] = (),
        beside: Sequence[str] = (),
        out: str | None = None,
        say: Callable[[str], None] = print,
    ):
        why = "vil benchmark deploy measures only classifiers"
        refuse_without(cfg, "predicts_classes", why)
        for path in settings.paths:
            lookup(PATHS, path, "path")
        paths = tuple(dict.fromkeys((PLAIN, *settings.paths)))
        self.settings, self.say = settings._replace(paths=paths), say
        self.cfg, self.name = override(with_num_classes(cfg), PLAIN_CPU), name
        self.class_names = list(class_names) or recorded_classes(cfg)
        self.others = {other: override(self.cfg, [f"MODEL.ARCH={other}"]) for other in beside}
        self.calibration = []
        if settings.calibration is not None:
            channels = cfg.INPUT.CHANNELS
            names = self.class_names
            self.calibration = find_calibration_images(settings.calibration, names, channels)
        self.results = ResultFolder(out, "deploy", torch.device("cpu"))
        extent = f"{1 + len(self.others)} models, {len(paths)} paths"
        self.title = self.results.title(extent, settings.rounds)

    def run(self) -> list[Row]:
        """Measure each model with each path. Write the results and a plot of accuracy against
        speed. Returns a row per model and path.

        A path is one way to run a model for inference, such as "onnx+int8".
        """
        settings = self.settings
        with tempfile.TemporaryDirectory() as folder:
            subjects = [self.open_model(Path(folder))]
            subjects += [self.open_other(name, Path(folder)) for name in self.others]
            rows = compare_paths(
                subjects,
                settings.paths,
                batches=settings.batches,
                rounds=settings.rounds,
                least_agreement=settings.least_agreement,
                say=self.say,
            )
        self.results.write([row.plain(settings.batches) for row in rows])
        plot_accuracy_and_speed(rows, max(settings.batches), self.results.folder / "deploy.png")
        return rows

    def open_model(self, folder: Path) -> Subject:
        """Load the config's model with its weights, or build it with random weights if the config
        sets none. folder: folder for exported files."""
        cfg = self.cfg
        if not cfg.MODEL.MODEL_PATH and not cfg.MODEL.PRETRAINED:
            return self.open_other(self.name, folder, cfg)
        inference = load_model(cfg, self.class_names)
        tuning_cache.load("cpu")  # of every batch size
        task = inference.task
        batches = iter_calibration_batches(cfg, task, self.calibration)
        if not self.calibration:
            batches = iter_inputs(task, select_training_images(task, MOST))
        calibration = torch.cat(list(batches))
        open_test_sets(task, cfg)
        images, targets = first_test_images(task, self.settings.images)
        size = (cfg.INPUT.IMAGE_SIZE,) * 2
        return Subject(self.name, inference.model, size, calibration, folder, images, targets)

    def open_other(self, name: str, folder: Path, cfg: CfgNode | None = None) -> Subject:
        """Build a model with random weights.

        name: name of the model in the results. folder: folder for exported files. cfg: config of
        the model. If it is None, `name` must be one of the other models (`beside`) that were passed
        to the constructor.
        """
        cfg = cfg or self.others[name]
        torch.manual_seed(cfg.SEED)
        device = configure_device(cfg)
        model = prepare_for_evaluation(cfg, task_for(cfg, device).build_model(), device).eval()
        tuning_cache.load("cpu")
        size = (cfg.INPUT.IMAGE_SIZE,) * 2
        calibration = torch.randn(16, cfg.INPUT.CHANNELS, *size)
        return Subject(name, model, size, calibration, folder, published=published_top1(name, cfg))


def published_top1(name: str, cfg: CfgNode) -> float | None:
    """Return the published top-1 of a model on ImageNet in percent, or None if it is not known.

    Also returns None if the image size is not 224. For a model of vil, also returns None if `cfg`
    defines another model than the packaged config of this name.
    """
    if name not in PUBLISHED or cfg.INPUT.IMAGE_SIZE != 224:
        return None
    if not name.startswith("timm/"):
        packaged, _ = configure.resolve(f"imagenet/{name}.yaml", configure.Options())
        keys = ("MODEL.ARCH", *SETTINGS.values(), *ATTENTION.values())
        if not diff(packaged, cfg).keys().isdisjoint(keys):
            return None
    return PUBLISHED[name]


class Selection:
    """Subset of the images of a dataset, with the interface of
    `vil.data.datasets.image_list.Images`. indices: indices of the images in `dataset`."""

    def __init__(self, dataset, indices: Sequence[int]):
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int):
        return self.dataset.image(self.indices[index])

    def sample_name(self, index: int) -> str:
        return self.dataset.sample_name(self.indices[index])


def select_training_images(task: Task, count: int) -> Selection:
    """Return at most `count` images of the training set, evenly spaced."""
    dataset = task.open_split()
    total = min(count, len(dataset))
    return Selection(dataset, [number * len(dataset) // total for number in range(total)])


def first_test_images(task: Task, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` images (N, c, H, W) of the first test set, and their classes (N,).
    Raises ConfigError if no image can be read."""
    name, loader = next(iter(task.test_sets.items()))
    images: list[Tensor] = []
    targets: list[Tensor] = []
    with closing(iter(loader)) as batches:
        for batch in batches:
            images.append(batch.to("cpu").images)
            targets.append(batch.targets)
            if sum(map(len, images)) >= count:
                break
    if not images:
        raise ConfigError(
            f"none of the images in the test set {name!r} can be read: use vil data check to find "
            "the reasons"
        )
    return torch.cat(images)[:count], torch.cat(targets)[:count]
