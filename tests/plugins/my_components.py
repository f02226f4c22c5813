"""A file of a user's: an attention, a backend, an optimizer, a schedule, a loss, a transform, a
data set and a task, registered from outside of the package. Given to a run by --import, or
installed."""

import math
import os
import random

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance

import vil
from vil.data import ImageDataset
from vil.layers.attention import FullAttention
from vil.ops import reference

VIL_PLUGIN_API = 1
WANTED = os.environ.get("COMPONENTS", "").split()


class Halved(FullAttention):
    """Full attention with its output scaled."""

    def __init__(self, *args, factor=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = factor

    def forward(self, x, grid, valid_hw=None):
        return self.factor * super().forward(x, grid, valid_hw)

    def macs(self, grid):
        return super().macs(grid)


def attend(q, k, v, window, *, num_global, bias, valid_hw, scale, dropout_p):
    return reference.attend(
        q, k, v, window, num_global=num_global, bias=bias, valid_hw=valid_hw, scale=scale
    )


class SignSGD(torch.optim.Optimizer):
    def __init__(self, groups, lr, beta):
        super().__init__(groups, dict(lr=lr, beta=beta, weight_decay=0.0))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    m.lerp_(p.grad, 1 - group["beta"])
                    p.sub_(group["lr"] * m.sign())


def sign_sgd(groups, settings, *, beta):
    plain = [
        {**g, "params": [p for _, p in g["params"]], "param_names": [n for n, _ in g["params"]]}
        for g in groups
    ]
    return SignSGD(plain, settings.lr, beta)


def square_root(schedule, time):
    return schedule.lr / math.sqrt(1 + time)


def squared(logits, targets, smoothing=0.0, *, weight):
    if not targets.is_floating_point():
        targets = F.one_hot(targets, logits.shape[-1]).float()
    return weight * (logits.softmax(-1) - targets).square().mean()


class Dim:
    """Darken by factors from all generators."""

    def __init__(self, strength):
        self.strength = strength

    def __call__(self, image):
        factor = random.random() + np.random.rand() + float(torch.rand(()))
        return ImageEnhance.Brightness(image).enhance(1 - self.strength * factor / 3)


class Grays(ImageDataset):
    """Uniform images whose gray level tells their class."""

    def __init__(self, root, split, transform=None, *, n=32, size=16, num_classes=2):
        super().__init__(split, transform)
        self.size, self.targets = size, np.arange(n) % num_classes
        self.classes = [f"gray {number}" for number in range(num_classes)]

    def image(self, index):
        return Image.new("RGB", (self.size,) * 2, (40 * int(self.targets[index]) + index,) * 3)

    def sample_name(self, index):
        return f"gray {index}"


def regression():
    """Image regression: one number per image, here its mean brightness."""
    from vil.data import build_dataset
    from vil.data.build import read_settings
    from vil.data.transforms import eval_transform
    from vil.engine.build import MEMORY_FORMATS, amp_dtype
    from vil.engine.distributed import all_reduce_sum
    from vil.engine.evaluation import iter_in_step
    from vil.engine.loop import Loss, Metric
    from vil.integrations.build import build_network
    from vil.pretrained.load_weights import load_weights
    from vil.tasks.base import Task
    from vil.tasks.image.build import transform_settings

    class Brightness(Task):
        metric = Metric("mae", higher_is_better=False, label="mean absolute error")

        def __init__(self, cfg, device):
            super().__init__(
                device=device,
                amp_dtype=amp_dtype(cfg.AMP.DTYPE, enabled=cfg.AMP.ENABLED),
                memory_format=MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT],
            )
            self.cfg, self.scale = cfg, cfg.BRIGHTNESS.SCALE

        def build_model(self, *, load_pretrained=False):
            return build_network(self.cfg, 1, load_pretrained=load_pretrained)

        def load_weights(self, model, path, *, strict=True):
            return load_weights(model, path)

        def open(self, name, split):
            transform = eval_transform(self.cfg.INPUT.IMAGE_SIZE, **transform_settings(self.cfg))
            return build_dataset(name, "", split, transform, **self.cfg.DATA.KWARGS)

        def train_loader(self, dist, *, bad_file=None, dataset=None):
            return read_settings(self.cfg).train_loader(
                dist, self.device, lambda: self.open(self.cfg.DATA.TRAIN[0], "train")
            )

        def test_loaders(self, dist, *, bad_file=None, datasets=None):
            self.test_sets = read_settings(self.cfg).test_loaders(
                dist, self.device, lambda name: self.open(name, "val")
            )
            return self.test_sets

        def errors(self, model, batch):
            truth = self.scale * batch.images.float().mean(dim=(1, 2, 3))
            return model(batch.images)[:, 0].float() - truth

        def loss(self, model, batch):
            weights = 1.0 + (batch.targets == 0).float()  # a real normalizer
            value = (weights * self.errors(model, batch).square()).sum()
            return Loss(value, weights.sum())

        def measure(self, model, name, between):
            total = torch.zeros(2, dtype=torch.float64, device=self.device)
            for batch in iter_in_step(self.test_sets[name], between):
                batch = batch.to(self.device, self.memory_format)
                total += torch.stack(
                    [self.errors(model, batch).abs().double().sum(), total.new_tensor(len(batch))]
                )
            error, count = all_reduce_sum(total).tolist()
            return {"mae": error / count, "count": int(count)}

    return Brightness


COMPONENTS = {
    "attention": lambda: vil.register_attention(
        "halved",
        Halved,
        keys={"factor": vil.Key("MODEL.VIT.MSVIT.HALVED_FACTOR", 0.5, "Factor of the output.")},
        about="full attention, scaled",
    ),
    "backend": lambda: vil.register_backend("spelled_out", attend, about="the reference"),
    "optimizer": lambda: vil.register_optimizer(
        "sign_sgd", sign_sgd, keys={"beta": vil.Key("OPTIM.SIGN.BETA", 0.9, "Momentum.")}
    ),
    "schedule": lambda: vil.register_schedule("square_root", square_root),
    "loss": lambda: vil.register_loss(
        "squared", squared, keys={"weight": vil.Key("LOSS.SQUARED_WEIGHT", 2.0, "Its weight.")}
    ),
    "transform": lambda: vil.register_transform(
        "dim", Dim, keys={"strength": vil.Key("AUG.DIM.STRENGTH", 0.5, "How much darker.")}
    ),
    "dataset": lambda: vil.register_dataset("grays", Grays, about="uniform images"),
    "task": lambda: vil.register_task(
        "brightness",
        regression(),
        keys={"scale": vil.Key("BRIGHTNESS.SCALE", 1.0, "Of the numbers to learn.")},
        about="the brightness of an image",
    ),
}


def register():
    """Register what $COMPONENTS names, or all."""
    for name, add in COMPONENTS.items():
        if name in WANTED or not WANTED:
            add()


if __name__.startswith("vil_import"):
    register()
