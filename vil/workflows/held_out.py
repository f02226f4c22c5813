"""Check that images which a run held out from training are still the held-out ones."""

from yacs.config import CfgNode

from vil.data.classes import match_classes
from vil.data.dataset import fingerprint
from vil.engine.checkpoint.save_load import STATE, read_state
from vil.tasks.base import Task
from vil.tasks.weight_files import find_weights
from vil.utils.errors import DataError


def check_held_out(cfg: CfgNode, task: Task, *parts: str) -> None:
    """Raise DataError if a run held out the images of a part from its training images, by
    DATA.VAL_FRACTION, TEST_FRACTION or FOLDS, and the config would divide them in another way now.

    The parts depend on all images: with one more or one less, the network was trained on some of
    the images that would be evaluated. A checkpoint has the fingerprint of its training images.
    Nothing is checked if RUN.ALLOW_CHANGES is set, or if the weights are not a run's checkpoint or
    were trained on another set. task: of the config, with the class names of the model. parts: the
    parts to evaluate, "test" or "val", see `Task.test_loaders`.
    """
    if not cfg.MODEL.MODEL_PATH or cfg.RUN.ALLOW_CHANGES or not task.has_splits:
        return
    settings, held_out = task.settings, []
    for part in parts:
        names = settings.val if part == "val" and settings.val else settings.test
        split = "test" if part == "test" and settings.val else "val"
        held_out += [name for name in names if split in settings.divided.get(name, ())]
    if not (held_out and task.supports("open_train_set")):
        return
    path = find_weights(cfg.MODEL.MODEL_PATH, cfg.DATA.DATA_DIR)
    folder = path if path.is_dir() else path.parent  # of a checkpoint, or any other
    saved = read_state(folder / STATE)[0] if (folder / STATE).is_file() else None
    if saved is None or saved.fixed.get("DATA.TRAIN", "") != repr(cfg.DATA.TRAIN):
        return
    dataset = task.open_train_set()
    if task.class_names and not settings.targetmap:
        by_position = settings.classes == "by_position"
        match_classes(dataset, task.class_names, "the training set", by_position=by_position)
    if not fingerprint(dataset).startswith(saved.data):
        count = saved.data.partition(" ")[0]
        raise DataError(
            f"{folder.parents[1]} was trained on other images than the division leaves for "
            f"training now ({count} then, {len(dataset)} now), so some of those to evaluate were "
            "trained on: restore the images and the keys of the section DATA, or set "
            "RUN.ALLOW_CHANGES to True to evaluate nevertheless"
        )
