"""Plans and measured peaks of tensor memory agree, and no peak exceeds the limit."""

import random

import pytest
import torch

from tests.common.streaming import make_image, make_model
from vil.streaming import prepare
from vil.utils.errors import ConfigError
from vil.utils.timing import peak_tensor_bytes

CPU = torch.device("cpu")
LOW, HIGH = 0.7, 1.1  # of the plan's peak
SHARE = 0.85  # of the stages that are local
MAX_PIXELS = 300 * 300
SEEDS = (2, 18)  # of random models


def measure(model, image, memory: int, outputs, folder) -> tuple[int, int]:
    """Return (planned, measured) peak bytes of tensors of a streamed forward pass."""
    run = prepare(model, image, outputs=outputs)
    plan = run.planner.choose(memory)
    measured = peak_tensor_bytes(lambda: run.execute(plan, folder=folder), CPU)
    return plan.peak_bytes, measured


def random_model(draw: random.Random):
    """A model of one to four stages of random widths, windows, masks and attentions."""
    parts, patches = [], [4, 2, 2, 2]
    for number in range(draw.randint(1, 4)):
        heads = draw.choice([1, 2, 3])
        dim = heads * draw.choice([8, 16, 24])
        is_local = not number or draw.random() < SHARE  # full attention takes long on fine grids
        parts.append(
            f"l{number + 1},h{heads},d{dim},n{draw.randint(1, 3)},s{int(is_local)},"
            f"g{draw.randint(0, 2)},p{patches[number]},f{draw.choice([2, 3, 5, 7])},"
            f"a{draw.randint(0, 1)}"
        )
    dtype = draw.choice([torch.float32, torch.float64])
    return make_model("_".join(parts), sw_exact=draw.choice([-1, 0, 1]), dtype=dtype)


def random_size(draw: random.Random) -> tuple[int, int]:
    height = draw.randint(64, 800)
    return height, draw.randint(64, max(64, min(800, MAX_PIXELS // height)))


def check_case(seed: int, folder, low: float = LOW) -> None:
    """Stream a random model under its least limit, and under one between that and the highest.

    low: least measured share of the planned memory.
    """
    draw = random.Random(seed)
    model, size = random_model(draw), random_size(draw)
    image = make_image(size, dtype=next(model.parameters()).dtype)
    outputs = draw.choice([("logits",), ("logits", "stages.0"), ("pooled",)])
    planner = prepare(model, image, outputs=outputs).planner
    with pytest.raises(ConfigError, match="the smallest possible limit is") as error:
        planner.choose(1000)
    least = int(str(error.value).rpartition("(")[2].split()[0])
    most = planner.choose(2**40).peak_bytes
    for limit in (least, (least + most) // 2, 2 * most):
        planned, measured = measure(model, image, limit, outputs, folder)
        where = f"{model.specs} {size} limit {limit}: planned {planned}, measured {measured}"
        assert measured <= limit, where
        assert low * planned <= measured <= HIGH * planned, where


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_plans_and_peaks_agree(seed, tmp_path, without_native):
    check_case(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_native_needs_no_more_than_planned(seed, tmp_path):
    """Plans are for the backend `blocked`, which stores more."""
    check_case(seed, tmp_path, low=0.0)
