"""Runs of reversible models: resumed bit for bit, and on two processes equal to one.

With gradient accumulation, averaged weights, mixup, drop path, random shift and autocast.
"""

import pytest
import torch
from safetensors.torch import load_file

from tests.common.small_runs import TINY, checkpoint, metrics, succeeds, torchrun
from vil.config import get_config
from vil.workflows.train import train_config

pytestmark = pytest.mark.long

DEEP = "MODEL.VIT.MSVIT.ARCH=l1,h1,d16,n3,s1,g1,p4,f3,a0_l2,h2,d32,n2,s0,g1,p2,f3,a0"
HALF = ("AMP.ENABLED=True", "AMP.DTYPE=bfloat16")
REVERSIBLE = (
    *TINY, DEEP, "MODEL.VIT.REVERSIBLE=True", "OPTIM.ACCUMULATE=2", "OPTIM.EMA=0.5",
    "MODEL.VIT.MSVIT.MODE=1", "MODEL.VIT.MSVIT.VIL_MODE_SWITCH=0.75", "AMP.TF32=False",
)  # fmt: skip
DRAWS = (
    *HALF,
    "MODEL.VIT.DROP_PATH=0.3", "MODEL.VIT.DROP=0.1", "AUG.MIXUP_PROB=0.8", "AUG.MIXUP=0.8",
    "RUN.SAVE_STEPS=3",
)  # fmt: skip
ALIKE = ("MODEL.VIT.DROP_PATH=0", "OPTIM.EPOCHS=1", "OPTIM.LR=0.05")  # ranks draw the same
PRECISIONS = {"float32": (), "bfloat16": HALF}
FILES = ("model.safetensors", "ema.safetensors")


def weights(folder, file):
    tensors = load_file(checkpoint(folder) / file).values()
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def train(folder, *words):
    return ["train", *REVERSIBLE, *words, "--output_dir", folder]


def test_a_stopped_run_resumes_bit_for_bit(tmp_path):
    succeeds(*train(tmp_path / "whole", *DRAWS))
    words = [*REVERSIBLE, *DRAWS, f"OUTPUT_DIR={tmp_path / 'stopped'}"]
    train_config(get_config(opts=words), max_steps=3)
    succeeds(*train(tmp_path / "stopped", *DRAWS), "--resume")
    assert len(metrics(tmp_path / "stopped", "train")) == len(metrics(tmp_path / "whole", "train"))
    for file in FILES:
        stopped, whole = (weights(tmp_path / name, file) for name in ("stopped", "whole"))
        assert torch.equal(stopped, whole)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    for name, words in PRECISIONS.items():
        succeeds(*train(root / f"alone {name}", *ALIKE, *words))
    runs = [
        train(root / f"{strategy} {name}", *ALIKE, *words, f"DISTRIBUTED.STRATEGY={strategy}")
        for strategy in ("ddp", "fsdp")
        for name, words in PRECISIONS.items()
    ]
    torchrun(2, *runs)
    return root


# Ranks sum gradients of half a batch, in bfloat16 rounded ones.
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-4)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(strategy, precision, tolerance, root):
    """Every gradient reaches the reduction, once: else DDP raises, or the weights differ."""
    for file in FILES:
        alone, together = (
            weights(root / f"{name} {precision}", file) for name in ("alone", strategy)
        )
        assert (together - alone).norm() < tolerance * alone.norm()
    losses, wanted = (
        [line["loss"] for line in metrics(root / f"{name} {precision}", "train")]
        for name in (strategy, "alone")
    )
    assert losses == pytest.approx(wanted, rel=10 * tolerance)
    assert wanted[-1] != wanted[0]
