"""Check that a config does not exceed this machine's memory and limit of open files."""

import os
import resource
from collections.abc import Sequence

from yacs.config import CfgNode

from vil.models.arch import StageSpec, least_parameters
from vil.utils.errors import ConfigError
from vil.utils.machine import total_bytes

FILES_PER_WORKER = 15  # for its process, its queue, and the tensors of two prefetched batches
FILES_PER_IDLE_WORKER = 5  # for its process and its queue


def check_model_size(stages: Sequence[StageSpec], num_outputs: int) -> None:
    """Raise ConfigError if a model's float32 weights exceed the memory of this machine.

    num_outputs: outputs of the head.
    """
    count = least_parameters(stages, num_outputs)
    if (size := 4 * count) > (limit := total_bytes()):
        raise ConfigError(
            f"MODEL.VIT.MSVIT.ARCH: the model has at least {count:.1e} parameters, which take "
            f"{gigabytes(size)}, more than the {gigabytes(limit)} of memory of this machine: use a "
            "smaller model"
        )


def check_batch_size(cfg: CfgNode, batch_size: int) -> None:
    """Raise ConfigError if a batch of `batch_size` float32 images exceeds this machine's memory."""
    side = cfg.INPUT.IMAGE_SIZE
    if (size := batch_size * cfg.INPUT.CHANNELS * side**2 * 4) > (limit := total_bytes()):
        raise ConfigError(
            f"DATALOADER.BSZ {cfg.DATALOADER.BSZ} and INPUT.IMAGE_SIZE {side}: a batch takes "
            f"{gigabytes(size)}, more than the {gigabytes(limit)} of memory of this machine: lower "
            "one of the two keys"
        )


def check_open_files(workers: int, num_sets: int) -> None:
    """Increase this process's soft limit of open files if the data loaders' workers need more.

    workers: workers per loader. num_sets: number of evaluation sets. Raises ConfigError if the hard
    limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # at most two loaders run at a time, for training and one evaluation set; others are idle
    per_worker = 2 * FILES_PER_WORKER + FILES_PER_IDLE_WORKER * (num_sets - 1)
    needed = len(os.listdir("/dev/fd")) + per_worker * workers
    if workers and needed > soft != resource.RLIM_INFINITY:
        if needed > hard != resource.RLIM_INFINITY:
            raise ConfigError(
                f"DATALOADER.WORKERS {workers} may need {needed} open files, but the limit is "
                f"{hard} (ulimit -Hn): set fewer workers"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
