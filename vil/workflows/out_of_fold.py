"""Predict each image of a cross-validation with the run that was not trained on this image."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset
from yacs.config import CfgNode

from vil.tasks import refuse_without, task_for
from vil.tasks.base import Task
from vil.utils.errors import ConfigError, in_python_words
from vil.utils.global_state import preserve_global_state
from vil.workflows.configure import ConfigWithClasses, Options, Overrides, as_options, run_config
from vil.workflows.ensemble import check_same, check_views, find_runs, make_ensemble
from vil.workflows.held_out import check_held_out
from vil.workflows.inference import load_model, open_test_sets
from vil.workflows.predict import iter_predictions


class Fold(NamedTuple):
    """Fold of a cross-validation: one run, its training images and its test images.

    run: folder of the run. task: of the run's config. held_out: {name of a test set: dataset}.
    trained_on: names of the training images, see `sample_names`.
    """

    run: str
    cfg: CfgNode
    task: Task
    class_names: Sequence[str]
    held_out: dict[str, Dataset]
    trained_on: set[str]


@in_python_words
def predict_out_of_fold(
    runs: str | Path | Iterable[str | Path],
    overrides: Overrides | None = None,
    *,
    checkpoint: str = "best",
    tta: str | int | None = None,
    batch_size: int | None = None,
    num_workers: int = 0,
) -> Iterator[Any]:
    """Yield a prediction for every image of a cross-validation, with its true class, labels or
    numbers.

    Each run predicts its own test sets. A test set is skipped if no run lists the same dataset in
    DATA.TRAIN.

    runs: folders with one run per fold, or a pattern such as "runs/fold*".
    overrides: changes to the configs.
    checkpoint: "best" or "last".
    tta, batch_size, num_workers: see `vil.predict`.
    Raises ConfigError if a fold is missing or occurs twice, if a training image is not in exactly
    one test set, or if a run was trained on an image of its test set.
    """
    words = [runs] if isinstance(runs, str | Path) else runs
    options = Options(as_options(overrides))
    found = {run: run_config(run, options, checkpoint=checkpoint) for run in find_runs(words)}
    folds = open_folds(found, tta)
    return iter_out_of_fold(folds, tta, batch_size, num_workers)


def open_folds(runs: dict[str, ConfigWithClasses], tta: str | int | None = None) -> list[Fold]:
    """Open the training and test sets of each run, and check that each training image is in exactly
    one test set. runs: {folder of a run: its config and class names}. tta: see `vil.predict`."""
    configs = [found.cfg for found in runs.values()]
    check_views(configs[0].TASK, tta)
    why = "--out-of-fold needs a task that opens its training set by the method open_train_set"
    refuse_without(configs[0].TASK, "open_train_set", why)
    check_same(configs, [found.class_names for found in runs.values()])
    names, folds = {name for cfg in configs for name in cfg.DATA.TRAIN}, []
    for run, (cfg, class_names) in runs.items():
        if cfg.DATA.TARGETMAP:
            raise ConfigError(
                f"{run} sets DATA.TARGETMAP, so the classes of its test set differ from those of "
                "its model: use runs without DATA.TARGETMAP"
            )
        task = task_for(cfg, torch.device("cpu"))
        task.class_names = list(class_names)
        check_held_out(cfg, task, "test")
        held_out = {name: each for name, each in open_test_sets(task).items() if name in names}
        if not held_out:
            raise ConfigError(
                f"the test sets of {run} ({', '.join(cfg.DATA.TEST)}) are not in DATA.TRAIN of any "
                f"run, so {run} is not a fold of the cross-validation: leave out this run"
            )
        several = len(cfg.DATA.TRAIN) > 1  # sample names then begin with the name of the dataset
        trained_on = sample_names("" if several else cfg.DATA.TRAIN[0], task.open_train_set())
        classes = list(class_names) or next(iter(held_out.values())).classes
        folds.append(Fold(run, cfg, task, classes, held_out, set(trained_on)))
    check_coverage(folds)
    return folds


def sample_names(name: str, dataset: Dataset) -> Iterator[str]:
    """Yield "<name of the dataset>/<name of the sample>" for each image of a dataset. If `name` is
    "", yield only the name of the sample."""
    prefix = f"{name}/" if name else ""
    return (f"{prefix}{dataset.sample_name(index)}" for index in range(len(dataset)))


def check_coverage(folds: Sequence[Fold]) -> None:
    """Raise ConfigError unless each training image is in the test set of exactly one run, which
    was not trained on it.

    The test sets must be disjoint. They may contain images that no run was trained on, such as
    validation images.
    """
    run_of: dict[str, str] = {}
    for fold in folds:
        names = {name for item in fold.held_out.items() for name in sample_names(*item)}
        if leaked := names & fold.trained_on:
            raise ConfigError(
                f"{fold.run} was trained on {len(leaked)} of the {len(names)} images of its test "
                f"set, such as {min(leaked)}: train this run without its test images"
            )
        if twice := [name for name in names if name in run_of]:
            raise ConfigError(
                f"{len(twice)} images are in the test sets of two runs, for example {min(twice)} "
                f"in {run_of[min(twice)]} and in {fold.run}: give one run for each fold"
            )
        run_of |= dict.fromkeys(names, fold.run)
    trained_on = set().union(*(fold.trained_on for fold in folds))
    if missing := trained_on - run_of.keys():
        raise ConfigError(
            f"{len(missing)} of the {len(trained_on)} training images are not in a test set of any "
            f"run (for example {min(missing)}): give one run for each fold"
        )


def iter_out_of_fold(
    folds: Sequence[Fold],
    tta: str | int | None = None,
    batch_size: int | None = None,
    num_workers: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """Yield predictions for the test images of each fold, with their true class, labels or numbers.

    One model is loaded at a time. tta: see `vil.predict`. batch_size, num_workers: None for the
    values in each run's config. settings: arguments of `Task.limit_classes`, such as {"top": 1}.
    """
    for fold in folds:
        with preserve_global_state():
            model = load_model(fold.cfg, fold.class_names)
        model.task.limit_classes(**(settings or {}))
        workers = fold.cfg.DATALOADER.WORKERS if num_workers is None else num_workers
        ensemble = make_ensemble([model], tta)
        for dataset in fold.held_out.values():
            predictions = iter_predictions(ensemble, dataset, batch_size, workers)
            for index, prediction in enumerate(predictions):
                target = model.task.describe_target(dataset, index)
                yield prediction if target is None else model.task.add_target(prediction, target)
