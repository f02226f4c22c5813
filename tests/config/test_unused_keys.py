"""Keys that another key switches off: one warning if they are set, none otherwise."""

import pytest
import yaml

from tests.common.built import task_of
from vil.config import dump, get_config, override
from vil.engine.distributed import DistInfo
from vil.optim.build import build_schedule
from vil.optim.learning_rates import ScaledLr

FAKE = (
    "DATA.TRAIN=[fake]", "DATA.TEST=[fake]", "DATA.KWARGS={n: 8, num_classes: 4}",
    "DATA.NUM_CLASSES=4", "DATALOADER.BSZ=4",
)  # fmt: skip
TIMM = "AUG.TIMM_AUG.USE_TRANSFORM"
FINETUNE = "FINETUNE.FINETUNE"
COLORS = ("AUG.COLOR_JITTER=[0, 0, 0, 0, 0]", "AUG.GRAY_SCALE=0.5", "AUG.GAUSSIAN_BLUR=0.5")
WARMUP = ("SOLVER.WARMUP_EPOCHS=1", "SOLVER.WARMUP_FACTOR=0.1")
UNUSED = [  # (words, reason, words that are unused)
    (("AUG.TIMM_AUG.RE_PROB=0", "AUG.TIMM_AUG.AUTO_AUGMENT=rand"), f"{TIMM} is False", 2),
    ((*COLORS, f"{FINETUNE}=True", f"{TIMM}=True"), f"{TIMM} is True", 4),
    (("FINETUNE.USE_TRAIN_AUG=True",), f"{FINETUNE} is False", 1),
    (("AUG.MIXUP=0.8", "AUG.MIXCUT=1", "AUG.MIXUP_MODE=elem"), "AUG.MIXUP_PROB is 0", 3),
    ((*WARMUP, "SOLVER.WARMUP_METHOD=constant"), "SOLVER.LR_POLICY is empty", 3),
    (("MULTILABEL.LOSS=asymmetric", "REGRESSION.MEAN=[1]"), "TASK is classification", 2),
]
USED = [
    ("AUG.TIMM_AUG.AUTO_AUGMENT=rand", f"{TIMM}=True"),
    ("AUG.TIMM_AUG.HFLIP=0",),
    COLORS,
    (f"{FINETUNE}=True", "FINETUNE.USE_TRAIN_AUG=True"),
    ("AUG.MIXUP=0.8", "AUG.MIXUP_PROB=0.5"),
    (*WARMUP, "SOLVER.LR_POLICY=cosine"),
    ("SOLVER.WARMUP_EPOCHS=0",),
    ("TASK=multilabel", "MULTILABEL.LOSS=asymmetric"),
]


def build(words, file=None):
    cfg = get_config(file, [*FAKE, *words])
    task_of(cfg).train_loader(DistInfo())
    build_schedule(cfg, "sgd", ScaledLr(0.1, 0.0), 10)


@pytest.mark.parametrize(("words", "why", "count"), UNUSED, ids=[why for _, why, _ in UNUSED])
def test_a_key_without_effect_is_named(words, why, count, caplog):
    build(words)
    keys = sorted(word.partition("=")[0] for word in words[:count])
    (line,) = [record.getMessage() for record in caplog.records if why in record.getMessage()]
    reason, _, named = line.partition(", so these keys have no effect: ")
    assert (reason, sorted(named.split(", "))) == (why, keys)


@pytest.mark.parametrize("words", USED, ids=lambda words: words[-1])
def test_a_key_with_an_effect_is_not_named(words, caplog):
    build(words)
    assert "no effect" not in caplog.text


STAGE = "l1,h1,d32,n1,s1,g1,p4,f6,a0"
RECIPES = [  # (recipe, options that switch off some of its keys, one of these keys, its new value)
    ("own/faster_rcnn_vil_nano.yaml", "DETECTION.MODEL=retinanet", "DETECTION.BOX.SAMPLES", 64),
    ("own/vil_nano_96.yaml", "TASK=regression", "LOSS.LABEL_SMOOTHING", 0.2),
    ("own/vil_nano_96.yaml", "MODEL.ARCH=timm/test_vit", "MODEL.VIT.MSVIT.ARCH", STAGE),
]


@pytest.mark.detection
@pytest.mark.parametrize(("recipe", "option", "key", "value"), RECIPES, ids=lambda value: value)
def test_keys_of_a_recipe_are_named_only_if_the_user_sets_them(
    recipe, option, key, value, tmp_path, caplog
):
    """On the command line, in a file, or in Python. A config that a run saved is no such file."""
    words, own = [option, "DATA.NUM_CLASSES=2"], [f"{key}={value}"]
    saved, mine = tmp_path / "config.yaml", tmp_path / "mine.yaml"
    saved.write_text(dump(get_config(recipe, words)))
    of_user = value
    for name in reversed(key.split(".")):
        of_user = {name: of_user}
    mine.write_text(yaml.safe_dump({"_BASE_": recipe, **of_user}))
    for cfg in (get_config(recipe, words), get_config(saved), override(get_config(recipe), words)):
        task_of(cfg).build_model()
        assert "no effect" not in caplog.text
    edited = get_config(recipe, words).clone()
    edited.defrost()
    edited.merge_from_list([key, value])
    for cfg in (
        get_config(recipe, [*words, *own]),
        get_config(mine, words),
        get_config(saved, own),
        override(get_config(recipe, words), own),
        edited,
    ):
        caplog.clear()
        task_of(cfg).build_model()
        (line,) = [message for message in caplog.messages if "no effect" in message]
        assert line.endswith(f"these keys have no effect: {key}")
