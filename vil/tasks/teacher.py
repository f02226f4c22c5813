"""Build the teacher of a config, a network whose features or outputs another one learns."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn
from yacs.config import CfgNode

from vil.config import get_config, override
from vil.config.defaults import KEYS
from vil.data.classes import read_class_names
from vil.integrations.build import build_network
from vil.integrations.external_models import PREFIX, build_external, preprocessing
from vil.pretrained import dinov2
from vil.pretrained.body_weights import load_body
from vil.pretrained.load_weights import load_weights
from vil.pretrained.model_card import build_from_card
from vil.pretrained.state_dict_io import find_run, read_metadata, read_weights
from vil.tasks.distillation.teacher import Source, Teacher
from vil.tasks.weight_files import find_weights
from vil.utils.downloads import root_cause
from vil.utils.errors import CheckpointError, ConfigError, as_config_error, one_line

log = logging.getLogger(__name__)

NORMALIZATION = {
    "INPUT.MEAN": IMAGENET_DEFAULT_MEAN,
    "INPUT.STD": IMAGENET_DEFAULT_STD,
}  # of networks of timm without published weights
# builds the network of a run: (the run's config, number of outputs, file of weights or None, config
# of the student) -> network
BuildNetwork = Callable[[CfgNode, int, Path | None, CfgNode], nn.Module]


def build_image_network(
    saved: CfgNode, num_outputs: int, path: Path | None, cfg: CfgNode
) -> nn.Module:
    """Build the network of a run of an image task, see BuildNetwork."""
    network = build_network(saved, num_outputs)
    if path:
        load_weights(network, path, rule=cfg.FINETUNE.RESIZE)
    return network


WITHOUT_HEAD = ("distillation", "simmim")  # the tasks of pretraining
# {TASK of a run: how to build its network} for teachers of image tasks and of distillation
IMAGE_NETWORKS = dict.fromkeys(
    ("classification", "multilabel", "regression", *WITHOUT_HEAD), build_image_network
)


@as_config_error
def build_teacher(
    cfg: CfgNode,
    device: torch.device,
    num_outputs: int = 0,
    *,
    networks: Mapping[str, BuildNetwork] = IMAGE_NETWORKS,
    image_size: int | None = 0,
) -> Teacher:
    """Build the teacher of a config. Its network is found when it is first needed.

    num_outputs: number of its outputs; 0 if only its features are used. networks: the tasks of runs
    whose network may be the teacher. image_size: side of its images in pixels if the config leaves
    it open; 0: the teacher's own, None: that in any case. Raises ConfigError if the config sets no
    teacher.
    """
    own, images = cfg.DISTILL, cfg.INPUT
    if not own.TEACHER:
        raise ConfigError(
            f"TASK {cfg.TASK} needs a teacher: set DISTILL.TEACHER, for example to dinov2_small or "
            "timm/vit_small_patch14_dinov2"
        )
    mean, std = (per_channel(v, images.CHANNELS) for v in (images.MEAN, images.STD))
    shown = images.IMAGE_SIZE, images.CROP_PCT, images.INTERPOLATION, mean, std
    more = tuple(images.BACKGROUND), tuple(cfg.DATA.VALUE_RANGE)
    return Teacher(
        own.TEACHER,
        partial(as_config_error(_find), cfg, num_outputs, networks),
        mean=mean,
        std=std,
        image_size=0 if image_size is None else own.IMAGE_SIZE or image_size,
        cache=Path(own.CACHE) if own.CACHE else None,
        cache_key=repr((shown, more, dict(cfg.DATA.KWARGS))),
        device=device,
    )


def refuse_cache(cfg: CfgNode) -> None:
    """Raise ConfigError if the teacher's outputs shall be kept, for a task whose images vary."""
    if cfg.DISTILL.CACHE:
        raise ConfigError(
            f"DISTILL.CACHE is set, but TASK {cfg.TASK} trains on other crops or sizes of its "
            "images in each epoch: set DISTILL.CACHE to ''"
        )


def per_channel(values: Sequence[float], channels: int) -> list[float]:
    """Return one value per channel. values: one for all channels, or one per channel."""
    return list(values) * (channels // len(values))


def _find(cfg: CfgNode, num_outputs: int, networks: Mapping[str, BuildNetwork]) -> Source:
    """Find the network of DISTILL.TEACHER. Raises CheckpointError if there are no weights."""
    given, weights = cfg.DISTILL.TEACHER, cfg.DISTILL.WEIGHTS
    if given == dinov2.NAME:
        given, weights = dinov2.ARCH, dinov2.NAME
    is_timm = given.startswith(PREFIX)
    path = None if is_timm else find_weights(given, cfg.DATA.DATA_DIR)
    if path and (run := find_run(path)):
        return _run_source(cfg, run, path, num_outputs, networks)
    if networks is not IMAGE_NETWORKS:
        raise ConfigError(
            f"DISTILL.TEACHER {cfg.DISTILL.TEACHER} cannot teach TASK {cfg.TASK}: name the folder "
            f"of a run of TASK {' or '.join(networks)}"
        )
    if path is None:
        return _timm_source(cfg, given, weights, num_outputs)
    return _file_source(cfg, path, num_outputs)


def _timm_source(cfg: CfgNode, arch: str, weights: str, num_outputs: int) -> Source:
    """Describe a network of timm. weights: a value of MODEL.MODEL_PATH; "": published weights."""
    name = arch.removeprefix(PREFIX)
    published = timm.get_pretrained_cfg(name)
    if published and not weights and not timm.is_model_pretrained(name):
        raise ConfigError(
            f"DISTILL.TEACHER {arch} has no published weights: set DISTILL.WEIGHTS to a file"
        )
    if num_outputs and weights == dinov2.NAME:
        num_outputs = 0  # it has features only
    if num_outputs and not weights and published and published.num_classes != num_outputs:
        raise ConfigError(
            f"DISTILL.TEACHER {arch}: its published weights have {published.num_classes} classes, "
            f"not {num_outputs}: train a teacher with your classes, and name its run"
        )

    @as_config_error
    def build(side: int, load: bool) -> nn.Module:
        options: dict[str, Any] = dict(num_classes=num_outputs, img_size=side)
        try:
            network = build_external(arch, pretrained=load and not weights, **options)
        except CheckpointError as error:
            reason = one_line(root_cause(error))
            raise CheckpointError(
                f"the weights of the teacher {arch} cannot be downloaded ({reason}): check the "
                "network, or set DISTILL.WEIGHTS to a file"
            ) from error
        if load and weights:
            state = read_weights(find_weights(weights, cfg.DATA.DATA_DIR))
            if num_outputs:
                load_weights(network, state)
            else:
                load_body(network, state, "linear")
        return network

    known = preprocessing(arch)
    side = published.input_size[-1] if published else cfg.INPUT.IMAGE_SIZE
    mean, std = (known.get(key, default) for key, default in NORMALIZATION.items())
    return Source(build, side, mean, std, num_outputs)


def _check_training(
    cfg: CfgNode, num_outputs: int, task: str, value_range: Sequence[float] | None
) -> None:
    """Compare the training of a teacher with the config: its task, if the student learns its
    outputs, and its DATA.VALUE_RANGE, None if unknown. Raises ConfigError for outputs of another
    task, such as logits of a softmax for labels, and warns of another range."""
    if num_outputs and task not in (cfg.TASK, *WITHOUT_HEAD):
        raise ConfigError(
            f"DISTILL.TEACHER {cfg.DISTILL.TEACHER} was trained for TASK {task}, and its outputs "
            f"mean something else than those of TASK {cfg.TASK}: use a teacher of the same task"
        )
    if value_range is not None and list(value_range) != list(cfg.DATA.VALUE_RANGE):
        log.warning(
            "the teacher %s was trained with DATA.VALUE_RANGE %s, but sees images with %s: its "
            "outputs are wrong for images of more than 8 bits",
            cfg.DISTILL.TEACHER, list(value_range), list(cfg.DATA.VALUE_RANGE),
        )  # fmt: skip


def _run_source(
    cfg: CfgNode, run: Path, path: Path, num_outputs: int, networks: Mapping[str, BuildNetwork]
) -> Source:
    """Describe the network of a run. path: a checkpoint of it."""
    saved = get_config(run / "config.yaml")
    if saved.TASK not in networks:
        raise ConfigError(
            f"DISTILL.TEACHER {cfg.DISTILL.TEACHER} is a run of TASK {saved.TASK}: use one of "
            f"{', '.join(networks)}"
        )
    _check_training(cfg, num_outputs, saved.TASK, saved.DATA.VALUE_RANGE)
    count = 0 if saved.TASK in WITHOUT_HEAD else saved.DATA.NUM_CLASSES
    names = read_class_names(run / "classes.txt") if count else []

    @as_config_error
    def build(side: int, load: bool) -> nn.Module:
        # the run's backend may not run on this device
        changes = [f"INPUT.IMAGE_SIZE={side}", "MODEL.VIT.MSVIT.BACKEND=auto"]
        own = override(saved, changes)
        return networks[saved.TASK](own, count, path if load else None, cfg)

    own = saved.INPUT
    mean, std = (per_channel(values, own.CHANNELS) for values in (own.MEAN, own.STD))
    return Source(build, own.IMAGE_SIZE, mean, std, count, names)


def _file_source(cfg: CfgNode, path: Path, num_outputs: int) -> Source:
    """Describe the network of a weight file with a model card."""
    card = read_metadata(path)
    if card is None:
        raise ConfigError(
            f"DISTILL.TEACHER {path} does not describe its model: name the folder of a run, a file "
            "that vil convert wrote, or set DISTILL.TEACHER to timm/NAME and DISTILL.WEIGHTS to "
            "the file"
        )

    @as_config_error
    def build_card(side: int, load: bool) -> nn.Module:
        network = build_from_card(card, img_size=side)
        if load:
            load_weights(network, path, rule=cfg.FINETUNE.RESIZE)
        return network

    transform, sides = card["transform"] or {}, card["model"]["img_size"]
    channels, count = card["model"]["in_chans"], card["model"]["num_classes"]
    task = (card.get("task") or {"name": KEYS["TASK"].default})["name"]
    _check_training(cfg, num_outputs, task, transform.get("value_range"))
    mean = per_channel(transform.get("mean", cfg.INPUT.MEAN), channels)
    std = per_channel(transform.get("std", cfg.INPUT.STD), channels)
    side = sides if isinstance(sides, int) else max(sides)
    return Source(build_card, side, mean, std, count, list(card["classes"] or []))
