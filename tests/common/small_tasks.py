"""The settings of a small run of every task: seconds on one core."""

from pathlib import Path

from tests.common.small_runs import FAKE, SMALL
from vil.tasks import TASKS

DETECTOR = (
    "DETECTION.MODEL=mask_rcnn", "DETECTION.FPN.STAGES=[1,2]", "DETECTION.FPN.CHANNELS=16",
    "DETECTION.ANCHORS.SIZES=[24,48,96]", "DETECTION.RPN.SAMPLES=16", "DETECTION.BOX.CHANNELS=16",
    "DETECTION.BOX.SAMPLES=16", "DETECTION.MASK.CHANNELS=8", "DETECTION.MASK.LAYERS=1",
    "DETECTION.RPN.POST_NMS_TRAIN=20", "DETECTION.RPN.POST_NMS_TEST=20",
    "DETECTION.INPUT.TRAIN_SIZES=[48,64]", "DETECTION.INPUT.TEST_SIZE=64",
    "DETECTION.INPUT.MAX_SIZE=96", "INPUT.IMAGE_SIZE=96", "DEVICE=cpu", "LOG_FREQ=1",
    "MODEL.VIT.MSVIT.ARCH=l1,h1,d16,n1,s1,g1,p4,f3,a0_l2,h2,d32,n1,s1,g1,p2,f3,a0",
    "DATALOADER.BSZ=4", "OPTIM.LR=1e-3", "OPTIM.EPOCHS=2", "DATA.NUM_CLASSES=3",
    "DATA.TRAIN=[fake_boxes]", "DATA.TEST=[fake_boxes]",
    "DATA.KWARGS={n: 8, size: 64, num_classes: 3}",
)  # fmt: skip

SMALL_TASKS = {
    "classification": (*SMALL, *FAKE),
    "detection": DETECTOR,
    "distillation": (
        *SMALL, *FAKE, "TASK=distillation", "DISTILL.TEACHER=ViL_Nano_Weights.DIGITS",
    ),
    "multilabel": (*SMALL, *FAKE, "TASK=multilabel"),
    "regression": (*SMALL, *FAKE, "TASK=regression"),
    "segmentation": (
        *SMALL, "SEGMENTATION.MODEL=mlp", "SEGMENTATION.CHANNELS=8", "DATA.NUM_CLASSES=3",
        "DATA.TRAIN=[fake_masks]", "DATA.TEST=[fake_masks]",
        "DATA.KWARGS={n: 32, size: 40, num_classes: 3}",
    ),
    "simmim": (*SMALL, *FAKE, "TASK=simmim"),
}  # fmt: skip
IMAGE_TASKS = ("classification", "multilabel", "regression")  # one target per image
OTHERS = [name for name in TASKS if name != "classification"]


def words_of(task: str, folder: Path) -> tuple[str, ...]:
    """The settings of a run in a folder, with data beside it if the task writes any."""
    return (*SMALL_TASKS[task], f"DATA.PATH={folder}.data")
