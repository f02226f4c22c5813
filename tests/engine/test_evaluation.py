"""The context in which models are evaluated."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vil.engine.evaluation import autocast, evaluating

CPU = torch.device("cpu")


class CountCasts(TorchDispatchMode):
    """Counts the conversions of tensors of a shape to bfloat16."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += kwargs.get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


def run(model, batches=3):
    for images in torch.randn(batches, 4, 6):
        with autocast(CPU, torch.bfloat16):
            model(images)


def test_autocast_converts_each_weight_once_in_an_evaluation():
    model = torch.nn.Linear(6, 8)
    with CountCasts(model.weight.shape) as casts, evaluating(model):
        run(model)
    assert casts.count == 1


def test_training_mode_is_restored_and_operations_stay_in_float32():
    model = torch.nn.Linear(6, 8)
    with evaluating(model):
        assert not model.training
        assert model(torch.randn(4, 6)).dtype == torch.float32
    assert model.training
    assert torch.is_grad_enabled()
