"""Move a model to its device, shard it and compile it."""

import logging
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from vil.engine.distributed import DistInfo
from vil.engine.fsdp import shard
from vil.models.stage import Stage
from vil.models.vision_longformer import MsViT
from vil.ops import choose
from vil.optim import OPTIMIZERS
from vil.optim.ema import Ema
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.machine import has_compiler
from vil.workflows.attention_backend import attention_network, backend_requests
from vil.workflows.execution import Execution

log = logging.getLogger(__name__)


class TrainedModel(NamedTuple):
    """A model ready for training, and a moving average of its weights (None without OPTIM.EMA)."""

    model: nn.Module
    ema: Ema | None


@as_config_error
def prepare_for_training(
    model: nn.Module,
    execution: Execution,
    dist: DistInfo,
    *,
    strategy: str = "ddp",
    optimizer: str = "",
    ema_decay: float = 0.0,
) -> TrainedModel:
    """Move the model to the device, shard it if `strategy` is "fsdp", and compile it.

    Also creates a moving average of the weights if `ema_decay` is above 0. Call this function
    before building the optimizer, because sharding replaces the parameters. optimizer: its name.
    """
    model = move_to_device(model, execution)
    ema = Ema(model, ema_decay) if ema_decay else None
    models = [model, *([ema.model] if ema else [])]
    is_compiled = execution.compile_mode is not None
    if is_compiled and any(isinstance(m, Stage) and m.reversible for m in model.modules()):
        log.warning("MODEL.COMPILE compiles reversible blocks for evaluation, but not for training")
    if strategy == "fsdp" and dist.world > 1:
        _check_sharding(optimizer, execution.amp_dtype)
        for each in models:
            _shard(each, dist, execution.device, execution.amp_dtype)
    _compile(models, execution)
    return TrainedModel(model, ema)


def prepare_for_evaluation(model: nn.Module, execution: Execution) -> nn.Module:
    """Move the model to the device, and compile it."""
    model = move_to_device(model, execution, training=False)
    _compile([model], execution)
    return model


@as_config_error
def move_to_device(model: nn.Module, execution: Execution, *, training: bool = True) -> nn.Module:
    """Move the model to the device, and convert its memory format.

    Raises ConfigError if the model names an attention backend that cannot run evaluation or, if
    `training`, the backward pass on this device.
    """
    for request in backend_requests(model, execution, training=training):
        choose(request.case, request.backend)
    return model.to(execution.device, memory_format=execution.memory_format)


def _compile(models: list[nn.Module], execution: Execution) -> None:
    """Set each model up to be compiled on its first call, if `execution` says so."""
    if execution.compile_mode is None:
        return
    kind = execution.device.type
    if not has_compiler(kind):
        what = "Triton" if kind == "cuda" else "a C++ compiler (CXX or g++)"
        raise ConfigError(
            f"MODEL.COMPILE needs {what}, which was not found: install it, or set MODEL.COMPILE to "
            "False"
        )
    for model in models:
        model.compile(mode=execution.compile_mode)


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
