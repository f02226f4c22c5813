"""One training step on synthetic data: does a config build, and does it fit into memory?"""

import logging
import tempfile
from pathlib import Path

import torch
from yacs.config import CfgNode

from vil.config import override
from vil.engine.logger import memory_mb
from vil.tasks import task_for
from vil.utils.errors import DataError
from vil.workflows.train import run_training

log = logging.getLogger(__name__)


def dry_run(cfg: CfgNode) -> tuple[int, float]:
    """Run one step on synthetic images, in a folder that is removed again; return their number and
    the peak memory in MB.

    Raises what the real data would raise; data that are not there are only a warning.
    """
    try:
        task_for(cfg, torch.device("cpu")).check_data()
    except DataError as error:
        if Path(cfg.DATA.PATH).is_dir():
            raise
        log.warning("the data are not checked: %s", str(error).splitlines()[0])
    num_images = cfg.DATALOADER.BSZ * cfg.OPTIM.ACCUMULATE
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"OUTPUT_DIR={folder}", "MODEL.VIT.MSVIT.TUNE=False"]  # which may take minutes
        trial = override(cfg, changes)
        task = task_for(trial, torch.device("cpu"))
        synthetic = {s: task.synthetic(num_images, Path(folder), s) for s in ("train", "val")}
        run_training(trial, max_steps=1, synthetic=synthetic)
    return num_images, memory_mb()
