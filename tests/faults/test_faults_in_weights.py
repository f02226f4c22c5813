"""Weights of a different model, head or image size are refused, and resized on request."""

import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.common.faults.real_runs import really
from tests.common.faults.records import record
from tests.common.small_runs import TINY, checkpoint, vil

CHECKPOINT = 4
ARCH = "MODEL.VIT.MSVIT.ARCH"
# Absolute embeddings and a window in stage 1, a table over the whole map in stage 2.
OURS = (*TINY, f"{ARCH}=l1,h1,d16,n1,s1,g1,p4,f3,a1_l2,h2,d32,n1,s0,g1,p2,f3,a0")
DEEPER = f"{ARCH}=l1,h1,d16,n2,s1,g1,p4,f3,a1_l2,h2,d32,n1,s0,g1,p2,f3,a0"
STILL = ("OPTIM.LR=1e-30", "OPTIM.WD=0", "OPTIM.EPOCHS=1")  # too little to be seen in a weight
LINES = ("stages.0.embed.position.x_pos_embed", "stages.0.embed.position.y_pos_embed")
TABLE = "stages.1.blocks.0.attn.local_relative_position_bias_table"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    assert vil("train", *OURS, "OPTIM.EPOCHS=1", "--output_dir", folder).code == 0
    return folder


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def weights(folder):
    return load_file(checkpoint(folder) / "model.safetensors")


def listed(kind, text) -> set[str]:
    return set(re.findall(rf"; {kind}: ([^\s;]+)", text))


def test_f20_resuming_with_another_model(trained):
    """Refused because of the config, and with RUN.ALLOW_CHANGES because of the weights."""
    before, refused = weights(trained), 0
    changes = (DEEPER, "INPUT.IMAGE_SIZE=48", "DATA.NUM_CLASSES=7")
    for words in changes:
        words = (*OURS, words, "DATA.KWARGS.num_classes=7" if "NUM" in words else "LOG_FREQ=1")
        words = (*words, "DATA.CLASSES=by_position")  # or their names would be refused before
        words = (*words, "--output_dir", trained, "--resume", "OPTIM.EPOCHS=2")
        ended = vil("train", *words)
        refused += ended.code == CHECKPOINT and "set RUN.ALLOW_CHANGES to True" in ended.err
        ended = vil("train", *words, "RUN.ALLOW_CHANGES=True")
        refused += (
            ended.code == CHECKPOINT
            and "from another model: restore that model's config" in ended.err
        )
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trained).items())
    what = "3 changes refused on resume, without and with RUN.ALLOW_CHANGES (of 6)"
    record("F20", what, refused, 6)


def taken_over(found, state, names):
    """Return whether the named weights are those of the file."""
    return all(torch.allclose(found[n], state[n], rtol=0, atol=1e-20) for n in names)


SEVEN = (*OURS, "DATA.NUM_CLASSES=7", "DATA.KWARGS.num_classes=7")


def test_f20_another_head(trained, tmp_path):
    state = weights(trained)
    ended = really("train", *SEVEN, f"MODEL.MODEL_PATH={trained}", "--output_dir", "keep")
    refused = ended.code == CHECKPOINT and "FINETUNE.HEAD to new or rows:FILE" in ended.err
    assert listed("mismatched", ended.err) == {"head.weight", "head.bias"}
    what = "a different number of classes: refused, naming the key that allows it"
    record("F20", what, refused, True)
    (tmp_path / "rows.txt").write_text("3 1 0 2 2 1 0\n")
    rest, right = [name for name in state if not name.startswith("head.")], 0
    for head in ("new", "rows:rows.txt"):
        words = (*SEVEN, *STILL, f"FINETUNE.HEAD={head}", f"MODEL.MODEL_PATH={trained}")
        ended = vil("train", *words, "--output_dir", head[:4])
        assert ended.code == 0, ended.err
        found = weights(head[:4])
        wanted = state["head.weight"][[3, 1, 0, 2, 2, 1, 0]]
        rows = torch.allclose(found["head.weight"], wanted, rtol=0, atol=1e-20)
        right += taken_over(found, state, rest) and rows == (head != "new")
    record("F20", "FINETUNE.HEAD new and rows: only the head differs (of 2)", right, 2)


def resized(state, side, rule):
    """Return the tables resized as documented, for `side` x `side` tokens in stage 1."""
    lines = {name: state[name].double() for name in LINES}
    if rule == "crop":
        lines = {name: line[:, :side] for name, line in lines.items()}
    else:
        lines = {
            name: F.interpolate(line.mT, side, mode="linear").mT for name, line in lines.items()
        }
    old, new = (2 * 4 - 1, 2 * (side // 2) - 1)  # of stage 2
    image = state[TABLE].double().T.reshape(1, -1, old, old)
    table = F.interpolate(image, (new, new), mode="bilinear")
    return {**lines, TABLE: table[0].flatten(1).T}


def test_f20_another_image_size(trained):
    state, right = weights(trained), 0
    rest = [name for name in state if name not in (*LINES, TABLE)]
    for size, rule in ((48, "interpolate"), (24, "interpolate"), (24, "crop")):
        words = (f"INPUT.IMAGE_SIZE={size}", f"MODEL.VIT.POS_RESIZE={rule}")
        folder = f"{rule} {size}"
        words = (*OURS, *STILL, *words, f"MODEL.MODEL_PATH={trained}", "--output_dir", folder)
        run = really if size == 48 else vil
        ended = run("train", *words)
        assert ended.code == 0, ended.err
        assert listed("resized", re.sub(r"^\S+ +", "  ", ended.out)) <= {*LINES, TABLE}
        assert "3 resized" in ended.out
        found, wanted = weights(folder), resized(state, size // 4, rule)
        close = all(torch.allclose(found[n].double(), wanted[n], atol=1e-6) for n in wanted)
        right += close and taken_over(found, state, rest)
    what = "different image sizes: only the position tables are resized, by POS_RESIZE (of 3)"
    record("F20", what, right, 3)
    words = ("INPUT.IMAGE_SIZE=48", "MODEL.VIT.POS_RESIZE=crop", f"MODEL.MODEL_PATH={trained}")
    ended = really("train", *OURS, *words, "--output_dir", "out")
    refused = ended.code == CHECKPOINT and listed("mismatched", ended.err) == {*LINES}
    advised = ended.err.endswith("set MODEL.VIT.POS_RESIZE to interpolate\n")
    what = "a position table too small to crop: refused, with the fix"
    record("F20", what, refused and advised, True)
