"""Object detection: boxes and, optionally, masks.

build.py            task from a config            task.py            loss, evaluation, inference
data/               COCO annotations, datasets, transforms, batches, validation of files
models/             backbone, feature pyramid, heads, detectors, loading of weights
coco_eval.py        average precision             error_analysis.py  images with the most errors
tiled_inference.py  very large images             cost.py            parameters and MACs
output_formats.py   formats of `vil predict`      visualize.py       drawing of boxes and masks
keys.py             config keys of detectors      detections.py      detections of an image
distillation.py     learning from a teacher

ENTRY describes the task to the registry (see `vil/tasks/__init__.py`).
"""

from vil.tasks.detection import keys

# {name: (label, unit, higher is better)}, see `coco_eval.average_precision`
METRICS = {
    f"{prefix}_{name}": (f"{prefix} {label}", "%", True)
    for prefix in ("box", "mask")
    for name, label in {
        "ap": "AP",
        "ap50": "AP50",
        "ap75": "AP75",
        "ap_s": "AP of small objects",
        "ap_m": "AP of medium objects",
        "ap_l": "AP of large objects",
        "ar100": "AR100",
    }.items()
}
ENTRY = dict(
    home="vil.tasks.detection.build:Detection",
    about="boxes, and masks, of objects",
    noun="detector",
    declares=keys.DECLARED,
    implied_by="DETECTION.MODEL",
    commands={
        "detect check": "check boxes of a folder or an annotation file, list what training skips",
    },
    metrics=METRICS,
    formats=("text", "json", "coco"),
    flags={
        "tile": "DETECTION.TEST.TILE",
        "overlap": "DETECTION.TEST.OVERLAP",
        "score": "DETECTION.TEST.SCORE",
    },
    defaults={"DETECTION.TEST.SCORE": 0.5},
)
