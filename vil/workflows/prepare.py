"""Find the weights of a model, and move, shard and compile it as the config says."""

import logging
import re
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from yacs.config import CfgNode

from vil.engine.build import MEMORY_FORMATS, amp_dtype
from vil.engine.checkpoint.manifest import find_corruption
from vil.engine.checkpoint.save_load import AVERAGE, resolve_link
from vil.engine.distributed import DistInfo
from vil.engine.fsdp import shard
from vil.models.stage import Stage
from vil.models.vision_longformer import MsViT
from vil.ops import choose
from vil.optim import OPTIMIZERS
from vil.optim.build import optimizer_name
from vil.optim.ema import Ema
from vil.pretrained import state_dict_io
from vil.pretrained.catalog import get_weight
from vil.utils.errors import CheckpointError, ConfigError, as_config_error
from vil.utils.machine import has_compiler
from vil.workflows.attention_backend import attention_network, backend_requests

MEMBER = re.compile(r"ViL_\w+_Weights\.\w+")  # a weights entry of vil.pretrained.catalog
log = logging.getLogger(__name__)


@as_config_error
def find_weights(given: str, data_dir: str) -> Path:
    """Return the path of a weight file or checkpoint folder.

    given: a name such as "ViL_Tiny_Weights.IMAGENET1K_V1", or a path, which may be relative to
    `data_dir`. The path of a run's folder selects the run's best checkpoint. The path of a text
    file `best` or `last` selects the checkpoint that the file names.

    If the checkpoint has averaged weights (OPTIM.EMA), returns the file of these weights. Raises
    CheckpointError if there are no weights, or if the checkpoint is corrupt.
    """
    if MEMBER.fullmatch(given) and not Path(given).exists():
        return get_weight(given).file()
    given = Path(given)
    places = list(dict.fromkeys((given, Path(data_dir, given))))
    path = next((place for place in places if place.exists()), None)
    if path is None:
        others = f", nor at {places[1]}" if len(places) > 1 else ""
        raise CheckpointError(f"there are no weights at {given}{others}: check the path")
    if path.name in state_dict_io.POINTERS and path.is_file():
        path = resolve_link(path.parent, path.name)
    elif (path / "config.yaml").is_file():
        path = resolve_link(path / "checkpoints", "best")
    if path is None:
        raise CheckpointError(f"the run in {given} has no best checkpoint yet")
    if path.is_file() or (path / "config.json").is_file():  # a file, a folder of save_pretrained
        return state_dict_io.find_weights(path)
    if reason := find_corruption(path):
        raise CheckpointError(
            f"{path} is damaged, or is not a checkpoint: {reason}; give the folder of a run, the "
            "folder of a checkpoint, or a weight file"
        )
    return path / AVERAGE if (path / AVERAGE).is_file() else path


class TrainedModel(NamedTuple):
    """A model ready for training, and a moving average of its weights (None without OPTIM.EMA)."""

    model: nn.Module
    ema: Ema | None


@as_config_error
def prepare_for_training(
    cfg: CfgNode, model: nn.Module, dist: DistInfo, device: torch.device
) -> TrainedModel:
    """Move the model to the device, then shard and compile it if the config says so.

    Also creates a moving average of the weights if OPTIM.EMA is above 0. Call this function before
    building the optimizer, because sharding replaces the parameters.
    """
    model = move_to_device(cfg, model, device)
    ema = Ema(model, cfg.OPTIM.EMA) if cfg.OPTIM.EMA else None
    models = [model, *([ema.model] if ema else [])]
    if cfg.MODEL.COMPILE and any(isinstance(m, Stage) and m.reversible for m in model.modules()):
        log.warning("MODEL.COMPILE compiles reversible blocks for evaluation, but not for training")
    if cfg.DISTRIBUTED.STRATEGY == "fsdp" and dist.world > 1:
        dtype = amp_dtype(cfg.AMP.DTYPE, enabled=cfg.AMP.ENABLED)
        _check_sharding(optimizer_name(cfg.OPTIM.OPT, use_larc=cfg.SOLVER.USE_LARC), dtype)
        for each in models:
            _shard(each, dist, device, dtype)
    if cfg.MODEL.COMPILE:
        _compile(models, cfg.MODEL.COMPILE_MODE, device)
    return TrainedModel(model, ema)


def prepare_for_evaluation(cfg: CfgNode, model: nn.Module, device: torch.device) -> nn.Module:
    """Move the model to the device, and compile it if MODEL.COMPILE is set."""
    model = move_to_device(cfg, model, device, training=False)
    if cfg.MODEL.COMPILE:
        _compile([model], cfg.MODEL.COMPILE_MODE, device)
    return model


@as_config_error
def move_to_device(
    cfg: CfgNode, model: nn.Module, device: torch.device, *, training: bool = True
) -> nn.Module:
    """Move the model to the device, and convert it to the memory format of the config.

    Raises ConfigError if the config names an attention backend that cannot run evaluation or, if
    `training`, the backward pass on this device.
    """
    for request in backend_requests(model, cfg, device, training=training):
        choose(request.case, request.backend)
    return model.to(device, memory_format=MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT])


def _compile(models: list[nn.Module], mode: str, device: torch.device) -> None:
    """Set each model up to be compiled on its first call. mode: of `torch.compile`."""
    if not has_compiler(device.type):
        what = "Triton" if device.type == "cuda" else "a C++ compiler (CXX or g++)"
        raise ConfigError(
            f"MODEL.COMPILE needs {what}, which was not found: install it, or set MODEL.COMPILE to "
            "False"
        )
    for model in models:
        model.compile(mode=mode)


def _check_sharding(optimizer: str, amp_dtype: torch.dtype | None) -> None:
    """Raise ConfigError if sharded weights cannot be trained. optimizer: its name."""
    if amp_dtype == torch.float16:
        raise ConfigError("DISTRIBUTED.STRATEGY fsdp cannot train in float16: use bfloat16")
    if not OPTIMIZERS.entry(optimizer).facts.get("can_shard"):
        known = ", ".join(name for name, e in OPTIMIZERS.items() if e.facts.get("can_shard"))
        raise ConfigError(
            f"DISTRIBUTED.STRATEGY fsdp does not support the optimizer {optimizer}: set "
            f"DISTRIBUTED.STRATEGY to 'ddp', or use another optimizer ({known}, or an elementwise "
            "optimizer of timm, such as timm/lion)"
        )


def _shard(
    model: nn.Module, dist: DistInfo, device: torch.device, amp_dtype: torch.dtype | None
) -> None:
    """Shard a model in place, block by block if it is an MsViT. amp_dtype: see `shard`."""
    network = attention_network(model)
    stages = network.stages if isinstance(network, MsViT) else ()
    units = ([stage] if stage.reversible else stage.blocks for stage in stages)
    shard(model, chain.from_iterable(units), dist, device, amp_dtype)
