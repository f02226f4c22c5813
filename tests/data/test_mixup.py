"""Mixing: targets match the pixels, also in odd batches, and are reproducible.

An image of class c is 1 in channel c and 0 in the others, so that the mean of channel c is the
share of class c in the mixed image, and must equal its target.
"""

import itertools
import random

import numpy as np
import pytest
import torch

from vil.data.batch import Batch
from vil.data.mixup import MODES, Mix

pytestmark = pytest.mark.smoke

CLASSES = 3
RECIPES = {
    "mixup": {"mixup_alpha": 0.8},
    "cutmix": {"cutmix_alpha": 1.0},
    "both": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0},
    "minmax": {"cutmix_minmax": (0.2, 0.8)},
    "half": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "prob": 0.5},
}


def colored(size, step=0):
    targets = torch.arange(size) % CLASSES
    images = torch.nn.functional.one_hot(targets, CLASSES).float()[:, :, None, None]
    return Batch(images.repeat(1, 1, 20, 16), targets, torch.arange(size), epoch=1, step=step)


@pytest.mark.defect("B28")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_targets_match_the_pixels(recipe, mode):
    mix = Mix(CLASSES, mode=mode, **RECIPES[recipe])
    for size, step in itertools.product((1, 2, 3, 7, 8), range(6)):
        batch = colored(size, step)
        mixed = mix(batch)
        assert mixed.targets.shape == (size, CLASSES)
        assert torch.allclose(mixed.images.mean((2, 3)), mixed.targets, atol=1e-5)
        assert torch.allclose(mixed.targets.sum(1), torch.ones(size))
        assert torch.equal(batch.images, colored(size).images)  # the input is unchanged


@pytest.mark.parametrize("mode", MODES)
def test_something_is_mixed(mode):
    mixed = Mix(CLASSES, mode=mode, mixup_alpha=1.0)(colored(8)).targets
    assert (mixed.max(1).values < 0.999).sum() >= 4


def test_smoothing_applies_to_all_samples():
    mixed = Mix(CLASSES, mixup_alpha=0.8, prob=0.0, label_smoothing=0.3)(colored(5))
    expected = torch.full((5, CLASSES), 0.1)
    expected[torch.arange(5), torch.arange(5) % CLASSES] = 0.8
    assert torch.allclose(mixed.targets, expected)


def test_random_numbers_are_a_function_of_seed_epoch_step_and_rank_alone():
    options = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    first = Mix(CLASSES, **options)(colored(4, step=3))
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    random.seed(5)
    np.random.seed(5)
    again = Mix(CLASSES, **options)(colored(4, step=3))
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.targets, again.targets)
    others = [
        Mix(CLASSES, **options)(colored(4, step=4)),
        Mix(CLASSES, **options)(colored(4, step=3), rank=1),
        Mix(CLASSES, seed=1, **options)(colored(4, step=3)),
    ]
    assert not any(torch.equal(first.images, other.images) for other in others)


@pytest.mark.defect("B28")
def test_nothing_to_mix_and_unknown_modes_are_rejected():
    with pytest.raises(ValueError, match="mixup_alpha > 0"):
        Mix(CLASSES)
    with pytest.raises(ValueError, match="did you mean 'batch'"):
        Mix(CLASSES, mixup_alpha=1.0, mode="batches")
