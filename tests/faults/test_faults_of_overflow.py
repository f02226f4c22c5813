"""Infinite gradients in float16 and bfloat16: the step is skipped and counted."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.common.faults.real_runs import INJECTED, begin, end_all, said, wait_for_end
from tests.common.faults.records import record
from tests.common.faults.same_runs import equal_digests, fingerprint
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


def test_f12_infinite_gradients(runs):
    right = {"still": 0, "counted": 0, "scaled": 0, "infinite": 0}
    for name, folder in runs.items():
        last = 2 * PER_EPOCH if name in ("whole", "resumed") else PER_EPOCH
        bad = [step for step in BAD if step < last]
        lines = metrics(folder, "train")
        scale = None if "bfloat16" in name else 2.0 ** (16 - len(bad))
        state = torch.load(checkpoint(folder) / "state.pt", weights_only=True)
        right["still"] += still(folder, last) == bad
        right["counted"] += lines[-1]["skipped"] == state["state"]["skipped"] == len(bad)
        right["scaled"] += lines[-1].get("scale") == state["scaler"].get("scale") == scale
        weights = [load_file(file) for file in folder.glob("checkpoints/*/*.safetensors")]
        right["infinite"] += sum(not x.isfinite().all() for w in weights for x in w.values())
    what = "runs in which the non-finite steps, and only these, change nothing (of 7)"
    record("F12", what, right["still"], 7)
    record("F12", "runs that log the number of skipped steps (of 7)", right["counted"], 7)
    what = (
        "runs with the expected loss scale: halved at each skipped step in float16, none in "
        "bfloat16 (of 7)"
    )
    record("F12", what, right["scaled"], 7)
    record("F12", "non-finite tensors in all checkpoints", right["infinite"], 0)


def test_f12_a_float16_run_resumes_bit_for_bit(runs):
    same = equal_digests(runs["resumed"], runs["whole"])
    what = (
        "resumed between non-finite steps: SHA-256 digests equal, including the loss scale (of 5)"
    )
    record("F12", what, same, 5)


def test_f12_a_loss_that_is_scaled_too_much(tmp_path):
    """Real overflow: the scale falls until float16 holds the gradients."""
    folder = tmp_path / "run"
    words = (*SMALL, HALF, LONGER, "RUN.SAVE_STEPS=0")
    process = begin(folder, *words, "DATALOADER.BSZ=4", fault={"what": "scale", "scale": 2.0**22})
    wait_for_end(process)
    end_all(process)
    assert process.returncode == 0, said(folder)
    lines = metrics(folder, "train")
    skipped = [line.get("skipped", 0) for line in lines]
    scales = [line["scale"] for line in lines]
    assert 3 <= skipped[-1] <= 10
    assert lines[-1]["loss"] is not None
    falls = all(scale == 2.0 ** (22 - count) for scale, count in zip(scales, skipped))
    record("F12", "real overflow: the loss scale halves with each skipped step", falls, True)
