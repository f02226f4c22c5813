"""Check that images which a run held out from training are still the held-out ones."""

from yacs.config import CfgNode

from vil.data.classes import match_classes
from vil.data.dataset import fingerprint
from vil.engine.checkpoint.save_load import STATE, read_state
from vil.tasks.base import Task
from vil.utils.errors import DataError
from vil.workflows.calibration import find_checkpoint


def check_held_out(cfg: CfgNode, task: Task) -> None:
    """Raise DataError if a run divided its training images (DATA.VAL_FRACTION, TEST_FRACTION or
    FOLDS), and the config would divide them in another way now.

    The parts depend on all images: with one more or one less, the network was trained on some of
    the images that would be evaluated. A checkpoint has the fingerprint of its training images.
    Nothing is checked if RUN.ALLOW_CHANGES is set, or if the weights are not a run's checkpoint or
    were trained on another set. task: of the config, with the class names of the model.
    """
    checkpoint = find_checkpoint(cfg.MODEL.MODEL_PATH, cfg.DATA.DATA_DIR, "keep")
    if checkpoint is None or cfg.RUN.ALLOW_CHANGES or not task.has_splits:
        return
    file = checkpoint.run / "checkpoints" / checkpoint.name / STATE
    if not (task.settings.divided and task.supports("open_train_set") and file.is_file()):
        return
    saved = read_state(file)[0]
    if saved.fixed.get("DATA.TRAIN", "") != repr(cfg.DATA.TRAIN):
        return
    dataset, settings = task.open_train_set(), task.settings
    if task.class_names and not settings.targetmap:
        by_position = settings.classes == "by_position"
        match_classes(dataset, task.class_names, "the training set", by_position=by_position)
    if not fingerprint(dataset).startswith(saved.data):
        count = saved.data.partition(" ")[0]
        raise DataError(
            f"{checkpoint.run} was trained on other images than the division leaves for training "
            f"now ({count} then, {len(dataset)} now), so some of those to evaluate were trained "
            "on: restore the images and the keys of the section DATA, or set RUN.ALLOW_CHANGES to "
            "True to evaluate nevertheless"
        )
