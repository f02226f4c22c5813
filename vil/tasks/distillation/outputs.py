"""Learn the outputs of a teacher besides labels: knowledge distillation.

Source: Hinton, Vinyals and Dean, arXiv:1503.02531, section 2. Shapes: B images, K classes, H W size
of an image in pixels.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.data.batch import Batch
from vil.data.dataset import LoadableDataset
from vil.engine.loop import Loss
from vil.tasks.distillation.teacher import TRAIN, Teacher
from vil.utils.errors import ConfigError


def distance_of_classes(outputs: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Return the Kullback-Leibler divergence of class probabilities, a mean over images and pixels.
    It is multiplied by the square of the temperature, as in the paper."""
    logs = (F.log_softmax(logits / temperature, dim=1) for logits in (outputs, wanted))
    return temperature**2 * F.kl_div(*logs, reduction="none", log_target=True).sum(1).mean()


def distance_of_labels(outputs: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Return the binary cross entropy with the teacher's probabilities."""
    return F.binary_cross_entropy_with_logits(outputs, torch.sigmoid(wanted))


def distance_of_numbers(outputs: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Return the mean squared difference of normalized numbers."""
    return F.mse_loss(outputs, wanted)


DISTANCES = {
    "softmax": distance_of_classes,
    "sigmoid": distance_of_labels,
    "none": distance_of_numbers,
}


class OutputDistillation:
    """Mixes the loss of the labels with one of the teacher's outputs.

    activation: function of the outputs: "softmax" for classes, "sigmoid" for labels, "none" for
    numbers.
    share: weight of the teacher's part; the labels' part has the rest.
    temperature: divisor of the logits of both networks before a softmax.
    """

    def __init__(self, teacher: Teacher, activation: str, *, share: float, temperature: float):
        self.teacher, self.distance = teacher, DISTANCES[activation]
        self.share, self.temperature = share, temperature

    def open(self, dataset: LoadableDataset, classes: Sequence[str], *, load: bool) -> None:
        """Prepare to learn on a training set. Raises ConfigError if the teacher has no outputs, or
        other classes than the student.

        classes: names of the student's classes; empty if they do not matter. load: whether to load
        the teacher's weights.
        """
        source = self.teacher.source
        if not source.num_outputs:
            raise ConfigError(
                f"DISTILL.TEACHER {self.teacher.name} has no outputs for classes, only features: "
                "set TASK to distillation, or name the run of a classifier"
            )
        known = list(source.classes)
        if known and classes and known != list(classes):
            raise ConfigError(
                f"DISTILL.TEACHER {self.teacher.name} has other outputs than the training set, "
                f"such as {next(iter(set(known) ^ set(classes)), known[0])!r}, or in another "
                "order: use a teacher that was trained with the same ones"
            )
        self.teacher.open({TRAIN: dataset})
        if load:
            _ = self.teacher.network

    def mix(self, loss: Loss, outputs: Tensor, batch: Batch) -> Loss:
        """Return the loss of a batch with the teacher's part, which is a mean over the images and
        their pixels.

        loss: that of the labels. outputs: the student's, (B, K) or, for each pixel, (B, K, H, W).
        If the labels have weights, a micro-batch or a rank counts by its sum of weights.
        """
        wanted = self.teacher.outputs(batch)
        if wanted.shape[1] != outputs.shape[1]:
            raise ConfigError(
                f"DISTILL.TEACHER {self.teacher.name} has {wanted.shape[1]} outputs, but the "
                f"network has {outputs.shape[1]}: use a teacher with the same ones"
            )
        if outputs.shape[2:] != wanted.shape[2:]:  # the teacher has images of another size
            wanted = F.interpolate(wanted, outputs.shape[2:], mode="bilinear", antialias=True)
        part = self.distance(outputs.float(), wanted, self.temperature)
        total = 1.0 if loss.normalizer is None else loss.normalizer
        value = (1 - self.share) * loss.value + self.share * part * total
        return loss._replace(value=value, metrics=loss.metrics | {"teacher": part.detach()})
