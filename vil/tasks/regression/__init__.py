"""Regression: predict one or more numbers per image.

build.py           task from a config            task.py    loss, evaluation, inference
output_formats.py  formats of `vil predict`      report.py  regression's part of a report
keys.py            config keys of the task

ENTRY describes the task to the registry (see `vil/tasks/__init__.py`).
"""

from vil.tasks.regression import keys

ENTRY = dict(
    home="vil.tasks.regression.build:Regression",
    about="one or more numbers per image",
    noun="regression model",
    declares=keys.DECLARED,
    learned=("REGRESSION.MEAN", "REGRESSION.STD"),
    formats=("table", "json", "csv"),
    metrics={
        "mae": ("mean absolute error", "", False),
        "rmse": ("root mean squared error", "", False),
        "r2": ("R2", "", True),
        "loss": ("loss", "", False),
    },
    lacks={
        "evaluate --pictures": "--pictures supports only detectors; use vil report",
        "evaluate --calibrate": "--calibrate does not support regression",
        "convert": "vil convert supports only classifiers; predict from the run's folder",
        "export": "vil export supports only classifiers",
        "visualize attention": "vil visualize attention draws only the attention of classifiers",
    },
)
