"""Multilabel classification, in which an image can have any number of labels.

build.py           task from a config            task.py    loss, evaluation, inference
losses.py          training losses               report.py  multilabel's part of a report
output_formats.py  formats of `vil predict`      keys.py    config keys of the task

ENTRY describes the task to the registry (see `vil/tasks/__init__.py`).
"""

from vil.tasks.multilabel import keys

ENTRY = dict(
    home="vil.tasks.multilabel.build:Multilabel",
    about="any number of labels per image",
    noun="multilabel classifier",
    declares=keys.DECLARED,
    formats=("table", "json", "csv"),
    metrics={
        "map": ("mean average precision", "%", True),
        "macro_f1": ("macro F1", "%", True),
        "micro_f1": ("micro F1", "%", True),
        "exact": ("images with all labels correct", "%", True),
        "loss": ("loss", "", False),
    },
    lacks={
        "evaluate --pictures": "--pictures supports only detectors; use vil report",
        "convert": "vil convert supports only classifiers; predict from the run's folder",
        "export": "vil export supports only classifiers",
        "visualize attention": "vil visualize attention draws only the attention of classifiers",
    },
)
