"""Files from somebody else with random bytes changed: the command ends with a documented exit code
and at most one line."""

import random
import re
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.common.data_files import samples, write_folder, write_tar, write_tsv, write_zip
from tests.common.small_runs import TINY, succeeds, vil
from vil.tasks import TASKS

pytestmark = [pytest.mark.trust(11), pytest.mark.long]

CODES = (0, 2, 3, 4)  # 1 is an error that nobody expected
WARNING = re.compile(r"(WARNING |\S.*: \w*Warning: |  |weights of |the shipped )")
LOADED_HERE = "DATALOADER.WORKERS=0"
ON_DATA = (
    "evaluate", "--run", "run", "--data", "data", LOADED_HERE, "DATA.CLASSES=by_position",
    "--output_dir", "out",
)  # fmt: skip
GENERATED = ("DATA.TEST=[fake]", "DATA.KWARGS={n: 8, num_classes: 4}", LOADED_HERE)
FROM_CARD = ("evaluate", "MODEL.MODEL_PATH=weights.safetensors", "DEVICE=cpu", "OUTPUT_DIR=out")
TARGETS = {  # file -> the command that reads it
    "data/val.tsv": (*ON_DATA, "DATA.TEST=[tsv]"),
    "data/val.yaml": (*ON_DATA, "DATA.TEST=[tsv]"),
    "data/val.tar": (*ON_DATA, "DATA.TEST=[tar]"),
    "data/val.zip": (*ON_DATA, "DATA.TEST=[imagenet]"),
    "images/a.png": ("predict", "--run", "run", "images"),
    "images/b.jpg": ("predict", "--run", "run", "images"),
    "images/c.tif": ("predict", "--run", "run", "images"),
    "weights.safetensors": (*FROM_CARD, *GENERATED),
    "weights.pth": ("evaluate", "--run", "run", "MODEL.MODEL_PATH=weights.pth"),
    "given.yaml": ("config", "--config-file", "given.yaml"),
}
if "detection" in TASKS:
    TARGETS["data/coco.json"] = ("detect", "check", "data/coco.json", "--images", "data/images")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a run and the files of all targets."""
    root = tmp_path_factory.mktemp("inputs")
    succeeds("train", "--output_dir", root / "run", *TINY, LOADED_HERE, "OPTIM.EPOCHS=1")
    succeeds("convert", root / "run", root / "weights.safetensors")
    torch.save({"net": load_file(root / "weights.safetensors")}, root / "weights.pth")
    shutil.copy(root / "run/config.yaml", root / "given.yaml")
    files = {name: data for name, data in samples("val", 2).items() if int(name[1]) < 4}
    (root / "data").mkdir()
    for write in (write_folder, write_tar, write_zip, write_tsv):
        write(root / "data", "val", files)
    (root / "images").mkdir()
    for name in ("a.png", "b.jpg", "c.tif"):
        Image.new("RGB", (20, 30), (200, 100, 50)).save(root / "images" / name)
    if "detection" in TASKS:
        from tests.common.detection.coco_files import box, write

        folder, file = write(root / "data", [box(1), box(2, image=2)])
        folder.rename(root / "data/images")
        file.rename(root / "data/coco.json")
    return root


def change(content, draw):
    """Flip a bit, insert, overwrite, delete or truncate at a random place."""
    at, noise = draw.randrange(len(content)), draw.randbytes(draw.randrange(1, 20))
    return draw.choice([
        content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
        content[:at] + noise + content[at:],
        content[:at] + noise + content[at + len(noise) :],
        content[:at] + content[at + len(noise) :],
        content[:at],
    ])  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_a_changed_file_ends_with_a_known_code_and_one_line(name, inputs, tmp_path, monkeypatch):
    shutil.copytree(inputs, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    file, words, draw = tmp_path / "here" / name, TARGETS[name], random.Random(name)
    assert vil(*words).code == 0
    whole = file.read_bytes()
    for number in range(12):
        file.write_bytes(change(whole, draw))
        ended = vil(*words)
        lines = [line for line in ended.err.splitlines() if not WARNING.match(line)]
        assert ended.code in CODES, f"{number}: {ended}"
        assert len(lines) == (ended.code != 0), f"{number}: {ended}"
        assert "Traceback" not in ended.out
