"""A test set with other classes than the model's, by hand."""

import math

import pytest
import torch
from torch import nn

from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import CPU, Batch, samples, toy_model

pytestmark = pytest.mark.smoke

# Model classes 0 .. 6 and the test set's cat, dog, fish: 0 and 1 are cats, 3 a dog, 5 a cat or dog.
LINKS = torch.zeros(7, 3, dtype=torch.bool)
LINKS[[0, 1, 3, 5, 5], [0, 0, 1, 0, 1]] = True
CAT, DOG, FISH = range(3)


def task_on(*batches, class_mapping=LINKS, num_classes=7):
    return ClassificationTask(
        device=CPU,
        test_sets={"pets": batches},
        num_classes=num_classes,
        class_mapping={"pets": class_mapping},
        per_class=True,
    )


def batch_of(logits, targets):
    logits = torch.tensor(logits, dtype=torch.float64)
    return Batch(logits[:, :, None, None], torch.tensor(targets), torch.arange(len(logits)))


def test_classes_without_a_link_are_out_of_the_running():
    logits = [4.0, 1.0, 9.0, 3.0, 9.0, 2.0, 9.0]  # 2, 4 and 6 would win
    figures = task_on(batch_of([logits], [CAT]), batch_of([logits] * 2, [DOG, FISH]))
    figures = figures.evaluate(nn.Flatten())["pets"]
    assert figures["count"] == 3
    assert figures["top1"] == pytest.approx(100 / 3)  # the cat; the dog is second
    assert figures["top5"] == pytest.approx(200 / 3)  # nothing means fish
    assert figures["per_class"] == {"right": [1, 0, 0], "count": [1, 1, 1]}
    everything = sum(math.exp(logits[k]) for k in (0, 1, 3, 5))
    cat = sum(math.exp(logits[k]) for k in (0, 1, 5)) / everything
    dog = sum(math.exp(logits[k]) for k in (3, 5)) / everything
    assert figures["loss"] == pytest.approx(-(math.log(cat) + math.log(dog)) / 2)


def test_an_answer_that_means_two_classes_is_right_for_both():
    logits = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    figures = task_on(batch_of([logits] * 2, [CAT, DOG])).evaluate(nn.Flatten())["pets"]
    assert figures["top1"] == 100


def test_classes_that_mean_themselves_change_nothing():
    data, model = samples(20), toy_model()
    linked = task_on(data, class_mapping=torch.eye(7, dtype=torch.bool)).evaluate(model)["pets"]
    plain = ClassificationTask(
        device=CPU, test_sets={"pets": [data]}, num_classes=7, per_class=True
    ).evaluate(model)["pets"]
    assert linked.pop("loss") == pytest.approx(plain.pop("loss"), rel=1e-12)
    assert list(linked) == ["top1", "top5", "count", "per_class"]  # no metrics of pairs of classes
    for ours, theirs in ((linked.pop("per_class"), plain["per_class"]), (linked, plain)):
        assert ours == {name: theirs[name] for name in ours}


def test_images_of_classes_without_a_link_alone_have_no_loss():
    figures = task_on(batch_of([[0.0] * 7], [FISH])).evaluate(nn.Flatten())["pets"]
    assert math.isnan(figures["loss"])
    assert figures["top5"] == 0
