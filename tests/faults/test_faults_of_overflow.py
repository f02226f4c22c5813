"""Infinite gradients in float16 and bfloat16: the step is skipped and counted."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.common.faults.real_runs import INJECTED, finish
from tests.common.faults.same_runs import assert_same_end, fingerprint
from tests.common.small_runs import TINY, checkpoint, metrics, torchrun

PER_EPOCH = 12
BAD = [0, 4, 5, 14]  # steps; the last one only in runs of two epochs
FAULT = {"what": "inf", "step": BAD}
SMALL = (
    *TINY, "DATA.KWARGS.n=96", "DATALOADER.BSZ=8", "OPTIM.EPOCHS=1", "OPTIM.OPT=adamw",
    "OPTIM.LR=1e-3", "OPTIM.EMA=0.9", "OPTIM.CLIP_GRAD=1", "RUN.SAVE_STEPS=1", "RUN.KEEP=99",
    "AMP.ENABLED=True",
)  # fmt: skip
HALF, BRAIN = "AMP.DTYPE=float16", "AMP.DTYPE=bfloat16"
PARTS = ("DATALOADER.BSZ=4", "OPTIM.ACCUMULATE=2")
LONGER, RESUME, FSDP = "OPTIM.EPOCHS=2", "--resume", "DISTRIBUTED.STRATEGY=fsdp"
ALONE = {
    "whole": [(HALF, LONGER)],
    "resumed": [(HALF,), (HALF, LONGER, RESUME)],
    "in parts": [(HALF, *PARTS)],
    "bfloat16": [(BRAIN,)],
}
TOGETHER = {
    "ddp, float16": [(HALF,)],
    "ddp, bfloat16": [(BRAIN,)],
    "fsdp, bfloat16": [(BRAIN, FSDP)],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: folder}. With two ranks, the second has the infinite gradients."""
    root = tmp_path_factory.mktemp("overflow")
    with pytest.MonkeyPatch.context() as patch:
        for world, named in ((1, ALONE), (2, TOGETHER)):
            patch.setenv("FAULT", json.dumps({**FAULT, "rank": world - 1}))
            lines = [
                ["train", *SMALL, *words, "--output_dir", root / name, "--import", INJECTED]
                for name, starts in named.items()
                for words in starts
            ]
            torchrun(world, *lines)
    return {name: root / name for name in (*ALONE, *TOGETHER)}


def still(folder, last):
    """Return the steps that changed neither weights, EMA weights nor optimizer state. Step 0 is
    included if weights and EMA weights are equal after it."""
    steps = range(1, last + 1)
    prints = [fingerprint(folder / f"checkpoints/step-{step:08d}") for step in steps]
    names = ("model", "ema", "optimizer")
    same = [
        step
        for step, (before, after) in enumerate(zip(prints, prints[1:]), start=1)
        if all(before[name] == after[name] for name in names)
    ]
    return [0, *same] if prints[0]["model"] == prints[0]["ema"] else same


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_infinite_gradients(runs, name):
    """These steps, and only these, change nothing; they are counted; in float16 each halves the
    loss scale."""
    folder = runs[name]
    last = 2 * PER_EPOCH if name in ("whole", "resumed") else PER_EPOCH
    bad = [step for step in BAD if step < last]
    assert still(folder, last) == bad
    line = metrics(folder, "train")[-1]
    state = torch.load(checkpoint(folder) / "state.pt", weights_only=True)
    assert line["skipped"] == state["state"]["skipped"] == len(bad)
    scale = None if "bfloat16" in name else 2.0 ** (16 - len(bad))
    assert line.get("scale") == state["scaler"].get("scale") == scale
    for file in folder.glob("checkpoints/*/*.safetensors"):
        assert all(x.isfinite().all() for x in load_file(file).values())


def test_a_float16_run_resumes_bit_for_bit(runs):
    """Resumed between non-finite steps, with the loss scale."""
    assert_same_end(runs["resumed"], runs["whole"])


def test_a_loss_that_is_scaled_too_much(tmp_path):
    """Real overflow: the scale falls until float16 holds the gradients."""
    folder = tmp_path / "run"
    words = (*SMALL, HALF, LONGER, "RUN.SAVE_STEPS=0", "DATALOADER.BSZ=4")
    finish(folder, *words, fault={"what": "scale", "scale": 2.0**22})
    lines = metrics(folder, "train")
    skipped = [line.get("skipped", 0) for line in lines]
    assert 3 <= skipped[-1] <= 10
    assert lines[-1]["loss"] is not None
    assert [line["scale"] for line in lines] == [2.0 ** (22 - count) for count in skipped]
