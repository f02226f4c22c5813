"""Files from somebody else with random bytes changed: the command ends with a documented exit code
and at most one line."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.common.data_files import samples, write_folder, write_tar, write_tsv, write_zip
from tests.common.small_runs import TINY, succeeds, vil
from vil.engine.checkpoint.manifest import MANIFEST, MANIFEST_HASH, fingerprint, hash_manifest
from vil.pretrained.state_dict_io import read_metadata, write_weights
from vil.tasks import TASKS
from vil.utils.extras import is_installed

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
    "run/autotune.json": ("predict", "--run", "run", "images"),
    "given.yaml": ("config", "--config-file", "given.yaml"),
}
if is_installed("datasets"):
    ON_SAVED_SET = (*ON_DATA, "DATA.TEST=[pets/]", "DATA.KWARGS.all_rows=True")
    TARGETS |= dict.fromkeys(
        ("data/pets/data-00000-of-00001.arrow", "data/pets/state.json"), ON_SAVED_SET
    )
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
    if is_installed("datasets"):
        save_rows(root / "data/pets", files)
    (root / "images").mkdir()
    for name in ("a.png", "b.jpg", "c.tif"):
        Image.new("RGB", (20, 30), (200, 100, 50)).save(root / "images" / name)
    if "detection" in TASKS:
        from tests.common.detection.coco_files import box, write

        folder, file = write(root / "data", [box(1), box(2, image=2)])
        folder.rename(root / "data/images")
        file.rename(root / "data/coco.json")
    return root


def save_rows(folder, files):
    """Save images by name, such as c3/0.png, as a dataset of the library `datasets`."""
    from datasets import ClassLabel, Dataset, Features, Image

    features = Features(image=Image(), label=ClassLabel(names=[f"c{n}" for n in range(4)]))
    images = [{"bytes": content, "path": None} for content in files.values()]
    rows = {"image": images, "label": [int(name[1]) for name in files]}
    Dataset.from_dict(rows, features=features).save_to_disk(folder)


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


# Files of which every byte is valid, but a value is not: their containers have no checksum of ours.

VALUES = (
    None, True, -1, 0, 1e-7, 0.5, 3, 2049, 10**6, 10**12, 10**30, float("nan"), "", "x" * 99,
    [], [1], [0, 0, 0], [1e300] * 3, {}, {"full": {"rpe": 1}},
)  # fmt: skip
TENSORS = (
    lambda x: x[:1],
    lambda x: x.flatten(),
    lambda x: x.new_zeros(()),
    lambda x: x.new_zeros(10**6),
    lambda x: x.new_zeros(1).expand(10**6, 10**6),
    lambda x: x.new_zeros(1).expand_as(x),
    lambda x: x.to_sparse(),
    lambda x: x.to("meta"),
    lambda x: x.to(torch.float8_e4m3fn),
    lambda x: x * float("nan"),
    lambda x: [x],
)


def replace_value(content, draw):
    """Replace one value in nested dicts, or remove it."""
    holder = content
    while True:
        key = draw.choice(list(holder))
        if not (isinstance(holder[key], dict) and holder[key]) or draw.random() < 0.1:
            break
        holder = holder[key]
    if isinstance(holder[key], torch.Tensor) and draw.random() < 0.8:
        holder[key] = draw.choice(TENSORS)(holder[key].float())
    elif draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(VALUES)


def change_card(draw):
    card = read_metadata("weights.safetensors")
    replace_value(card, draw)
    write_weights("weights.safetensors", load_file("weights.safetensors"), card)


def change_weights(draw):
    content = torch.load("weights.pth")
    replace_value(content, draw)
    torch.save(content, "weights.pth")


def change_state(draw):
    """Change the state of the newest checkpoint, with a valid manifest."""
    folder = max(Path("run/checkpoints").glob("step-*"))
    content = torch.load(folder / "state.pt")
    replace_value(content, draw)
    torch.save(content, folder / "state.pt")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["state.pt"] = fingerprint(folder / "state.pt")
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (folder / MANIFEST_HASH).write_text(hash_manifest(folder))


RESUME = ("train", "--output_dir", "run", "--resume", *TINY, LOADED_HERE, "OPTIM.EPOCHS=2")
CHANGES = {
    change_card: TARGETS["weights.safetensors"],
    change_weights: TARGETS["weights.pth"],
    change_state: RESUME,
}


@pytest.mark.parametrize("make", CHANGES)
def test_a_changed_value_ends_with_a_known_code_and_one_line(make, inputs, tmp_path, monkeypatch):
    draw = random.Random(make.__name__)
    for number in range(20):
        here = tmp_path / str(number)
        shutil.copytree(inputs, here)
        monkeypatch.chdir(here)
        make(draw)
        ended = vil(*CHANGES[make])
        lines = [line for line in ended.err.splitlines() if not WARNING.match(line)]
        assert ended.code in CODES, f"{number}: {ended}"
        assert len(lines) == (ended.code != 0), f"{number}: {ended}"
        shutil.rmtree(here)
