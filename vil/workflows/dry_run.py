"""Run one training step on synthetic data, to check that a config is valid and fits in memory."""

import logging
import tempfile
from pathlib import Path

import torch
from yacs.config import CfgNode

from vil.config import override
from vil.engine.logger import memory_mb
from vil.tasks import task_for, with_num_classes
from vil.utils.errors import DataError
from vil.workflows.train import run_training

log = logging.getLogger(__name__)


def dry_run(cfg: CfgNode) -> tuple[int, float]:
    """Run one training step on synthetic images, in a temporary folder.

    The config's datasets are opened first. An error in them is raised, or only logged as a warning
    if the folder DATA.PATH does not exist.

    Returns (num_images, memory): the number of images in the step and the peak memory in MB.
    """
    try:
        cfg = with_num_classes(cfg)
        task_for(cfg, torch.device("cpu")).check_data()
    except DataError as error:
        if Path(cfg.DATA.PATH).is_dir() or cfg.DATA.NUM_CLASSES == "auto":
            raise
        log.warning("the data were not checked: %s", str(error).splitlines()[0])
    num_images = cfg.DATALOADER.BSZ * cfg.OPTIM.ACCUMULATE
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"OUTPUT_DIR={folder}", "MODEL.VIT.MSVIT.TUNE=False"]  # tuning may take minutes
        trial = override(cfg, changes)
        task = task_for(trial, torch.device("cpu"))
        synthetic = {s: task.synthetic(num_images, Path(folder), s) for s in ("train", "val")}
        run_training(trial, max_steps=1, synthetic=synthetic)
    return num_images, memory_mb()
