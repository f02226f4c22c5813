"""Classification: one class per image.

build.py          from a config to the task         task.py     loss and evaluation
losses.py         training losses                   topk.py     hits and losses image by image
predictions.py    predictions on a whole test set   report.py   their part of a run's page
output_formats.py what `vil predict` prints

Here is what the registry of tasks holds about it.
"""

ENTRY = dict(
    home="vil.tasks.classification.build:Classification",
    about="one class per image",
    noun="classifier",
    formats=("table", "json", "csv"),
    lacks={"evaluate --pictures": "--pictures draws a detector's images; vil report shows others"},
)
