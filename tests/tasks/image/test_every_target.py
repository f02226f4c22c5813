"""What all kinds of target share: weights of images, evaluation in batches, known targets."""

import csv

import pytest
import torch
from torch import nn

from tests.common.one_rank import broadcasts
from vil.data.batch import Batch
from vil.tasks.image.classes import Classes
from vil.tasks.image.labels import Labels
from vil.tasks.image.numbers import Numbers
from vil.tasks.image.target import Target
from vil.tasks.image.task import ImageTask
from vil.utils.errors import DataError

pytestmark = pytest.mark.smoke

CPU = torch.device("cpu")
COUNT, OUTPUTS = 23, 3
KINDS = {
    "classes": lambda: Classes(OUTPUTS, per_class=True),
    "labels": lambda: Labels(OUTPUTS),
    "numbers": lambda: Numbers(OUTPUTS, mean=[1.0, 2, 3], std=[1.0, 2, 4]),
}


def network_and_batch(target: Target) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    images = torch.randn(COUNT, 5)
    targets = {
        "class": torch.randint(OUTPUTS, (COUNT,)),
        "labels": torch.randint(2, (COUNT, OUTPUTS)).float(),
        "numbers": torch.randn(COUNT, OUTPUTS),
    }[target.target_type]
    return nn.Linear(5, OUTPUTS), Batch(images, targets, torch.arange(COUNT))


def pick(batch: Batch, part: torch.Tensor) -> Batch:
    return Batch(batch.images[part], batch.targets[part], batch.indices[part])


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_mean_over_images_with_their_weights(kind):
    model, batch = network_and_batch(KINDS[kind]())
    plain = ImageTask(KINDS[kind](), device=CPU)
    losses = torch.stack(
        [plain.loss(model, pick(batch, torch.tensor([i]))).value for i in range(COUNT)]
    )
    torch.testing.assert_close(plain.loss(model, batch).value, losses.mean())
    weights = torch.arange(float(COUNT))
    loss = ImageTask(KINDS[kind](), device=CPU, image_weights=weights).loss(model, batch)
    assert loss.normalizer.item() == weights.sum().item()
    torch.testing.assert_close(loss.value, (weights * losses).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_does_not_depend_on_batches_or_their_order(kind):
    def measure(size, step):
        target = KINDS[kind]()
        model, batch = network_and_batch(target)
        parts = torch.arange(COUNT).split(size)[::step]
        sets = {"set": [pick(batch, part) for part in parts]}
        return ImageTask(target, device=CPU, test_sets=sets).evaluate(model)["set"]

    whole = measure(COUNT, 1)
    assert whole["count"] == COUNT
    for size in (1, 7):
        metrics = measure(size, 1)
        assert metrics == measure(size, -1)
        assert metrics["loss"] == pytest.approx(whole["loss"], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_test_set_is_an_error(kind):
    task = ImageTask(KINDS[kind](), device=CPU, test_sets={"set": []})
    with pytest.raises(DataError, match="set has no readable image"):
        task.evaluate(nn.Identity())


@pytest.mark.parametrize("target", [Labels(2), Numbers(2)])
def test_an_error_of_rank_0_reaches_the_other_ranks(target, monkeypatch):
    task = ImageTask(target, device=CPU)
    batch = Batch(torch.zeros(1, 2), torch.zeros(1, 3), torch.tensor([0]))  # 3 targets, 2 outputs
    task.test_sets = {"set": [batch]}
    with broadcasts(monkeypatch) as sent, pytest.raises(ValueError, match="shape"):
        task.evaluate(torch.nn.Identity())
    assert "ValueError: " in sent[0][1]


@pytest.mark.parametrize(
    ("kind", "values", "lines"),
    [
        (Classes, dict(classes=[(0, 0.75)], target="=n"), ["a.png,1,n,0,0.75,,=n"]),
        (Labels, dict(labels=[0], probabilities=[0.75], target=""), ["a.png,0.75,,"]),
        (Labels, dict(error="no image", target="x|y"), ["a.png,,x|y,no image"]),
        (Numbers, dict(numbers=[0.00012], target="-1e-4"), ["a.png,0.00012,-1e-4,"]),
        (Numbers, dict(error="no image", target="2"), ["a.png,,2,no image"]),
    ],
)
def test_known_targets_are_written_in_every_format(kind, values, lines):
    """The empty target of an image without labels too, but no target that is not known."""

    def written(**values):
        prediction = kind.prediction("a.png", **values)
        return {name: "".join(write([prediction], ["n"])) for name, write in kind.formats.items()}

    known, unknown = written(**values), written(**values | {"target": None})
    assert all("target" in text for text in known.values())
    assert not any("target" in text for text in unknown.values())
    assert known["csv"].splitlines()[1:] == lines


@pytest.mark.parametrize("kind", KINDS)
def test_csv_has_the_names_of_classes_and_files_as_they_are(kind):
    """A spreadsheet may take them for formulas, but a script must find them again."""
    names, files = ["-1", "=1+1", "@a, b"], ["-3.png", "+1.png", "'a\".png"]
    target = KINDS[kind]()
    task = ImageTask(target, device=CPU)
    predictions = target.predict(torch.eye(OUTPUTS), files, names.__getitem__)
    known = [task.add_target(each, names[0]) for each in predictions]
    for format_name in {"csv", "probabilities"} & set(target.formats):
        text = "".join(target.formats[format_name](known, names))
        rows = list(csv.DictReader(text.splitlines()))
        assert {row["file"] for row in rows} == set(files)
        assert {row["target"] for row in rows} == {names[0]}
        assert set(names) <= ({row.get("class") for row in rows} | set(rows[0]))
