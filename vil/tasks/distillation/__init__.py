"""Learn the features of a trained network, the teacher, from images without labels.

build.py    task from a config             target.py   loss, similarity, predictions
model.py    student with projectors        teacher.py  the teacher
cache.py    the teacher's outputs on disk  outputs.py  outputs of a teacher, for tasks with labels

ENTRY describes the task to the registry (see `vil/tasks/__init__.py`). The config keys are those of
the section DISTILL, which other tasks use too.
"""

# {name: (label, unit, higher is better)}, see `target.Features.measure`
METRICS = {
    "similarity": ("similarity to the teacher", "%", True),
    "summary": ("cosine similarity of summaries", "%", True),
    "dense": ("cosine similarity of dense features", "%", True),
    "loss": ("loss", "", False),
}
ENTRY = dict(
    home="vil.tasks.distillation.build:Distillation",
    about="features of another network, without labels",
    noun="distilled network",
    metrics=METRICS,
    formats=("json",),
)
