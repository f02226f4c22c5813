"""Semantic segmentation: a class for each pixel.

build.py     task from a config                  task.py         loss, evaluation, inference
data.py      images with masks                   layouts.py      folders of datasets
mask_files.py  files of masks and classes
transforms.py  augmentation of image and mask    windows.py      large images in windows
models.py    network with a head                 heads.py        heads
losses.py    sums of losses                      metrics.py      counts of pixels, and metrics
predictions.py  output formats, drawings         report.py       content of the run report
stream.py    images larger than memory           keys.py         config keys

ENTRY describes the task to the registry (see `vil/tasks/__init__.py`).
"""

from vil.tasks.segmentation import keys

IGNORE = -1  # class number of a pixel without a label, in arrays and tensors
# {name: (label, unit, higher is better)}, see `metrics`
METRICS = {
    "miou": ("mIoU", "%", True),
    "pixel_accuracy": ("pixel accuracy", "%", True),
    "mean_accuracy": ("mean accuracy of classes", "%", True),
    "fw_iou": ("frequency-weighted IoU", "%", True),
    "boundary_f1": ("boundary F1", "%", True),
}
ENTRY = dict(
    home="vil.tasks.segmentation.build:Segmentation",
    about="a class for each pixel",
    noun="segmentation model",
    declares=keys.DECLARED,
    implied_by="SEGMENTATION.MODEL",
    metrics=METRICS,
    formats=("text", "json"),
    flags={"tile": "SEGMENTATION.TEST.TILE", "overlap": "SEGMENTATION.TEST.OVERLAP"},
)
