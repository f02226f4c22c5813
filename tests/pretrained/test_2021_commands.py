"""Checkpoints and command lines of the 2021 code, without a key of vil: its logits.

The weights and logits are those of tests/golden, computed by the original in float64.
"""

from pathlib import Path

import pytest
import torch

import vil
from tests.common.golden import GOLDEN, read
from vil.workflows.configure import Options, weights_config
from vil.workflows.inference import load_model

pytestmark = pytest.mark.trust(12)
CASES = sorted(file.stem for file in GOLDEN.glob("model_*.safetensors"))
EPSILON = ("MODEL.VIT.MSVIT.LN_EPS", "1e-5")  # a key that the original ignored
AGREES = 1e-6


def write_checkpoint(folder: Path, case: str) -> tuple[Path, list[str], dict]:
    """Write the checkpoint of a golden case. Return it, a command line and the case's tensors."""
    meta, tensors, parameters, _ = read(case)
    file = folder / "model_best.pth"
    state = {name: value.float() for name, value in parameters.items()}
    torch.save({"net": state, "epoch": 299, "best_metric": 0.75}, file)
    line = ["EVALUATE", "True", "MODEL.MODEL_PATH", str(file), "INPUT.IMAGE_SIZE",
            str(meta["image_size"]), "DATA.NUM_CLASSES", str(meta["num_classes"]),
            "MODEL.VIT.MSVIT.ATTN_TYPE", meta["attn_type"], "MODEL.VIT.MSVIT.ARCH", meta["arch"],
            "MODEL.VIT.NORM_EMBED", str(meta["norm_embed"]), "MODEL.VIT.MSVIT.SHARE_KV",
            str(meta["share_kv"]), "OPTIM.OPT", "adamw"]  # fmt: skip
    return file, line, tensors


def load(line: list[str]) -> torch.nn.Module:
    cfg = weights_config("tests/legacy/msvit.yaml", Options([*line, "DEVICE", "cpu"])).cfg
    return load_model(cfg).model


def logits(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.double()(x)


@pytest.mark.parametrize("more", [(), EPSILON], ids=["", "LN_EPS"])
@pytest.mark.parametrize("case", CASES)
def test_a_2021_command_gives_the_2021_logits(case, more, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    _, line, tensors = write_checkpoint(tmp_path, case)
    model = load([*line, *more])
    x, wanted = tensors["x"], tensors["logits"]
    vil.save_pretrained(model, tmp_path / "saved")
    ours = logits(model, x)
    # the weights were rounded to float32, in which the original saved them
    assert (ours - wanted).abs().max() < AGREES * wanted.abs().max()
    assert torch.equal(logits(vil.from_pretrained(tmp_path / "saved"), x), ours)
