"""Compare a run with the training of the weights that it starts from (MODEL.MODEL_PATH)."""

import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from yacs.config import CfgNode

from vil.config.defaults import leaves
from vil.config.dump_yaml import dump_value
from vil.data.classes import is_unnamed, read_class_names, respell
from vil.pretrained.load_weights import select_classes
from vil.pretrained.state_dict_io import read_metadata
from vil.tasks.weight_files import recorded_values
from vil.utils.console import printable
from vil.utils.errors import ConfigError

log = logging.getLogger(__name__)

PER_CLASS = ("LOSS.CLASS_WEIGHTS", "SEGMENTATION.PALETTE")  # of one word, or a list for classes
NORMALIZATION = ("INPUT.MEAN", "INPUT.STD", "DATA.VALUE_RANGE")


def recorded_classes(weights: Path, head: str) -> list[str]:
    """Return the class names recorded in a weight file or checkpoint, or in the run that saved it.

    head: value of FINETUNE.HEAD. If it loads only some rows of the head, returns the names of these
    rows. Returns [] if no names are recorded, or if `head` is "new".
    """
    path = Path(os.path.abspath(weights))
    card = read_metadata(path) or {}
    folders = [path, *path.parents][:3]  # the path may be RUN/checkpoints/CHECKPOINT/FILE
    runs = [folder.parent for folder in folders if folder.name == "checkpoints"]
    names = card.get("classes") or (read_class_names(runs[0] / "classes.txt") if runs else [])
    return select_classes(head, names) or []


def order_of_head(cfg: CfgNode, weights: Path, classes: Sequence[str]) -> list[str]:
    """Return the class names of a head in its order, if a training set has them in another order.

    Otherwise, returns []. If the head has as many classes of other names, logs a warning that they
    are taken for those of the training set. weights: where the head comes from. classes: the
    classes of the training set. Raises ConfigError if a key in PER_CLASS has a value for each class
    of the training set, because another order gives it to another class.
    """
    learned = recorded_classes(weights, cfg.FINETUNE.HEAD)
    here = respell(classes, learned)
    if here == learned or cfg.DATA.CLASSES == "by_position" or cfg.DATA.TARGETMAP:
        return []
    if sorted(here) == sorted(learned) and len(set(here)) == len(here):
        values = leaves(cfg)
        if listed := [key for key in PER_CLASS if len(values[key]) > 1]:
            raise ConfigError(
                f"{listed[0]} lists a value for each class, but the head of {weights} has the "
                f"classes in another order than the training set, such as {printable(learned[0])} "
                f"instead of {printable(here[0])} first: remove the key, or set FINETUNE.HEAD new"
            )
        return learned
    is_same_task = recorded_values(weights, ["TASK"]).get("TASK") == cfg.TASK
    is_named = not (is_unnamed(here) or is_unnamed(learned))
    if is_same_task and is_named and len(here) == len(learned):
        first = next(n for n, (one, other) in enumerate(zip(here, learned)) if one != other)
        log.warning(
            "the head of %s was trained for other classes, and is taken for those of the training "
            "set in their order, such as its %r for %r: FINETUNE.HEAD new starts with a new head",
            weights, learned[first], here[first],
        )  # fmt: skip
    return []


def warn_other_normalization(cfg: CfgNode, weights: Path) -> None:
    """Log a warning if weights were trained on images that were normalized in another way."""
    recorded, values = recorded_values(weights, NORMALIZATION), leaves(cfg)
    keys = [key for key in recorded if not _is_equal(recorded[key], values[key])]
    if keys:
        words = shlex.join(f"{key}={dump_value(recorded[key])}" for key in keys)
        log.warning(
            "the weights of %s were trained on images with another normalization; append %s to "
            "train on with it",
            weights, words,
        )  # fmt: skip


def _is_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two lists of numbers are equal. One number stands for all channels."""
    sizes = {len(one), len(other)}
    return (len(sizes) == 1 or 1 in sizes) and bool(np.all(np.array(one) == np.array(other)))
