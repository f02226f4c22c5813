"""Average the predictions of one or several trained models, with test-time augmentation.

Shapes: B images, V views.
"""

import glob
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image
from yacs.config import CfgNode

from vil.config.defaults import leaves
from vil.data.classes import respell
from vil.data.views import View, parse_views
from vil.engine.evaluation import evaluating
from vil.tasks import refuse_without
from vil.tasks.base import Task
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.plural import plural
from vil.workflows.inference import InferenceModel

# keys that determine how an image file is read
READING = ("DATA.VALUE_RANGE", "INPUT.CHANNELS", "INPUT.BACKGROUND")
MAX_NAMES = 5  # class names in a message


@dataclass
class Ensemble:
    """One or several models with the same classes, whose outputs are averaged.

    models: the loaded models, each with its own input transform. views: crops and flips that each
    model runs on, see `vil.data.views`. The average is over all models and views.
    """

    models: Sequence[InferenceModel]
    views: tuple[View, ...] = ()

    @cached_property
    def task(self) -> Task:
        """The task that decodes the averaged outputs, see `Task.for_ensemble`."""
        tasks = [model.task for model in self.models]
        return tasks[0].for_ensemble(tasks) if len(tasks) > 1 else tasks[0]

    @property
    def cfg(self) -> CfgNode:
        return self.models[0].cfg

    @property
    def classes(self) -> list[str]:
        return list(self.models[0].classes)

    @property
    def report(self) -> str:
        """One line per model that states which weights were loaded."""
        return "\n".join(model.report for model in self.models)

    def preprocess(self, image: Image.Image) -> list[Any]:
        """Convert an RGB image to the input of each model. Returns a list with an item per model:
        the input tensor or, with test-time augmentation, a list of tensors, one per view."""
        if not self.views:
            return [model.transform(image) for model in self.models]
        return [model.task.preprocess_views(image, self.views) for model in self.models]

    def run(self, inputs: Sequence[list[Any]]) -> Any:
        """Return the output of `Task.run` for B preprocessed images, averaged over the models and
        over the views of test-time augmentation.

        inputs: the results of `preprocess` for the B images. Each model runs once per view, with a
        batch of B images.
        """
        outputs = []
        for number, member in enumerate(self.models):
            tensors = [each[number] for each in inputs]
            batches = [tensors]
            if self.views:
                batches = [[each[view] for each in tensors] for view in range(len(self.views))]
            with evaluating(member.model) as model:
                outputs += [member.task.run(model, batch) for batch in batches]
        return outputs[0] if len(outputs) == 1 else self.task.average_outputs(outputs)


@as_config_error
def check_views(task: str, tta: str | int | None, num_models: int = 1) -> tuple[View, ...]:
    """Return the views (crops and flips) that a setting of test-time augmentation selects.

    task: name of the task. tta: the setting, see `parse_views`. num_models: number of models to
    average. Raises ConfigError if there are several views or models, but the task cannot average
    outputs.
    """
    views = parse_views(tta)
    if views or num_models > 1:
        why = (
            "the predictions of several views or models cannot be averaged, so leave out --tta and "
            "give one run"
        )
        refuse_without(task, "average_outputs", why)
    return views


def make_ensemble(models: Sequence[InferenceModel], tta: str | int | None = None) -> Ensemble:
    """Combine loaded models into an ensemble. tta: setting of test-time augmentation, see
    `parse_views`. Raises ConfigError if the models differ in the task, in the classes, or in the
    value range or number of channels of their images."""
    views = check_views(models[0].cfg.TASK, tta, len(models))
    check_same([model.cfg for model in models], [model.classes for model in models])
    return Ensemble(list(models), views)


def check_same(configs: Sequence[CfgNode], classes: Sequence[Sequence[str]]) -> None:
    """Raise ConfigError if the models differ in the task, in the classes, or in the value range or
    number of channels of their images. configs, classes: config and class names of each model."""
    first = configs[0]
    for number, (cfg, names) in enumerate(zip(configs[1:], classes[1:]), start=2):
        where = f"model {number} ({cfg.MODEL.MODEL_PATH or cfg.MODEL.ARCH})"
        for key in ("TASK", *READING):
            ours, theirs = leaves(first)[key], leaves(cfg)[key]
            if ours != theirs:
                raise ConfigError(
                    f"all models must have the same {key}, but the first model has {ours!r} and "
                    f"{where} has {theirs!r}"
                )
        names = respell(names, classes[0])
        if names != list(classes[0]):
            raise ConfigError(
                "all models must have the same classes in the same order, but the classes of "
                f"{where} differ: {differences(classes[0], names)}"
            )


def differences(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Describe how the class names of another model (`theirs`) differ from those of the first model
    (`ours`)."""
    classes = plural(len(ours), "class", "classes")
    texts = [f"the first model has {classes}, this one has {len(theirs)}"]
    for text, names, others in (("missing", ours, theirs), ("unknown", theirs, ours)):
        if odd := [name for name in names if name not in set(others)]:
            more = f" and {len(odd) - MAX_NAMES} more" if len(odd) > MAX_NAMES else ""
            texts.append(f"{len(odd)} {text}: {', '.join(odd[:MAX_NAMES])}{more}")
    if len(texts) == 1:
        place = next((n for n, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(theirs))
        texts.append(f"the order differs from class {place} on")
    return "; ".join(texts)


def find_runs(words: Iterable[str | Path]) -> list[str]:
    """Return the folders of runs. words: paths of folders, or patterns such as "runs/fold*".

    A pattern is replaced by all folders that match it, sorted so that fold10 comes after fold9.
    Raises ConfigError if no folder matches a pattern, or if a folder occurs twice.
    """
    found: list[str] = []
    for word in map(str, words):
        if not glob.has_magic(word) or Path(word).exists():
            found.append(word)
            continue
        folders = [folder for folder in glob.glob(word) if Path(folder).is_dir()]
        if not folders:
            raise ConfigError(f"--run {word}: no folder matches this pattern")
        found += sorted(folders, key=_numeric)
    real = [Path(folder).resolve() for folder in found]
    for number, folder in enumerate(found):
        if real[number] in real[:number]:
            raise ConfigError(f"--run {folder}: this run is given twice")
    return found


def _numeric(path: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts fold10 after fold9."""
    parts = re.split(r"(\d+)", path)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]
