"""Files from somebody else that were changed at random: the command ends with a documented exit
code and at most one line, and its process takes less than 2 GiB.

About a hundred inputs by default. Twenty thousand, or as many as there is time for, with the number
of inputs and the peak memory of each target:

    VIL_FUZZ_INPUTS=20000 VIL_FUZZ_SECONDS=1800 python -m pytest -m long -s tests/fuzz

An input is a function of its target and its number. A crash or a hang ends pytest, and its input
is left in pytest's temporary folder. What failed once has a test of its own, such as those in
tests/trust.
"""

import faulthandler
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.common.data_files import samples, write_folder, write_tar, write_tsv, write_zip
from tests.common.native_cache import cache_with_library, needs_compiler
from tests.common.small_runs import TINY, Outcome, succeeds, vil
from vil.engine.checkpoint.manifest import MANIFEST, MANIFEST_HASH, fingerprint, hash_manifest
from vil.ops.native import build, library
from vil.ops.tuning import tuning_cache
from vil.pretrained.state_dict_io import read_metadata, write_weights
from vil.tasks import TASKS
from vil.utils.extras import is_installed

pytestmark = [pytest.mark.trust(11), pytest.mark.long]

INPUTS = int(os.environ.get("VIL_FUZZ_INPUTS", 120))  # of all targets together
SECONDS = float(os.environ.get("VIL_FUZZ_SECONDS", "inf"))
HANG_SECONDS, MAX_KIBIBYTES = 120, 2 * 2**20
CODES = (0, 2, 3, 4, 5)  # 1 is an error that nobody expected
WARNING = re.compile(r"(WARNING |\S.*: \w*Warning: |  |weights of |the shipped )")
LOADED_HERE = "DATALOADER.WORKERS=0"
ON_DATA = (
    "evaluate", "--run", "run", "--data", "data", LOADED_HERE, "DATA.CLASSES=by_position",
    "--output_dir", "out",
)  # fmt: skip
FEW = "DATA.KWARGS={n: 16, size: 32, num_classes: 4}"  # one step per epoch
FROM_CARD = ("evaluate", "MODEL.MODEL_PATH=weights.safetensors", "DEVICE=cpu", "OUTPUT_DIR=out")
GENERATED = ("DATA.TEST=[fake]", FEW, LOADED_HERE)
RESUME = ("train", "--output_dir", "run", "--resume", *TINY, FEW, LOADED_HERE, "OPTIM.EPOCHS=2")
PREDICT = ("predict", "--run", "run", "images")
ON_SAVED_SET = (*ON_DATA, "DATA.TEST=[pets/]", "DATA.KWARGS.all_rows=True")
STATE = "run/checkpoints/step-00000001/state.pt"
ARROW = "data/pets/data-00000-of-00001.arrow"
TARGETS = {  # file -> the command that reads it
    "data/val.tsv": (*ON_DATA, "DATA.TEST=[tsv]"),
    "data/val.yaml": (*ON_DATA, "DATA.TEST=[tsv]"),
    "data/val.tar": (*ON_DATA, "DATA.TEST=[tar]"),
    "data/val.zip": (*ON_DATA, "DATA.TEST=[imagenet]"),
    "images/a.png": PREDICT,
    "images/b.jpg": PREDICT,
    "images/c.tif": PREDICT,
    "weights.safetensors": (*FROM_CARD, *GENERATED),
    "weights.pth": ("evaluate", "--run", "run", "MODEL.MODEL_PATH=weights.pth"),
    STATE: RESUME,
    "run/autotune.json": PREDICT,
    "given.yaml": ("config", "--config-file", "given.yaml"),
    "cache/attention.json": PREDICT,
    "cache/imports.json": ("config", "--config-file", "imports.yaml"),
}
if is_installed("datasets"):
    TARGETS |= dict.fromkeys((ARROW, "data/pets/state.json"), ON_SAVED_SET)
if "detection" in TASKS:
    TARGETS["data/coco.json"] = ("detect", "check", "data/coco.json", "--images", "data/images")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a run and the files of all targets."""
    root = tmp_path_factory.mktemp("inputs")
    succeeds("train", "--output_dir", root / "run", *TINY, FEW, LOADED_HERE, "OPTIM.EPOCHS=1")
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
    cache_with_library(root / "cache")
    tuned = {"backend": "masked", "trials": []}
    machines = {tuning_cache.machine("cpu"): {"a case": tuned}}
    (root / "cache/attention.json").write_text(json.dumps({"format": 1, "machines": machines}))
    return root


def save_rows(folder, files):
    """Save images by name, such as c3/0.png, as a dataset of the library `datasets`."""
    from datasets import ClassLabel, Dataset, Features, Image

    features = Features(image=Image(), label=ClassLabel(names=[f"c{n}" for n in range(4)]))
    images = [{"bytes": content, "path": None} for content in files.values()]
    rows = {"image": images, "label": [int(name[1]) for name in files]}
    Dataset.from_dict(rows, features=features).save_to_disk(folder)


@pytest.fixture
def here(inputs, tmp_path, monkeypatch):
    """A copy of the inputs, as the current folder."""
    folder = shutil.copytree(inputs, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("VIL_CACHE", str(folder / "cache"))
    (folder / "plugin.py").touch()
    (folder / "imports.yaml").write_text(f"IMPORTS: [{folder}/plugin.py]\n")
    succeeds("config", "--config-file", "imports.yaml", "--import", "plugin.py")
    return folder


def fuzz(name, try_input):
    """Call try_input(random generator), which returns a problem or "", for the inputs of a target
    until there are enough of them or the target's share of the time is over."""
    start, problems, count = time.monotonic(), [], 0
    faulthandler.register(signal.SIGALRM, chain=True)  # and end the process
    while count * NUM_TARGETS < INPUTS and time.monotonic() - start < SECONDS / NUM_TARGETS:
        signal.alarm(HANG_SECONDS)
        if problem := try_input(random.Random(f"{name} {count}")):
            problems.append(f"{count}: {problem}")
        signal.alarm(0)
        count += 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert peak < MAX_KIBIBYTES, f"{count - 1}: {peak} KiB"
    print(f"\n{name}: {count} inputs, {len(problems)} failed, peak {peak >> 10} MiB")
    assert not problems, "\n".join(problems)


def problem_of(ended: Outcome) -> str:
    """What a command did that it must not do."""
    lines = [line for line in ended.err.splitlines() if not WARNING.match(line)]
    is_known = ended.code in CODES and len(lines) == (ended.code != 0)
    return "" if is_known and "Traceback" not in ended.out else str(ended)


def change(content, draw):
    """Flip a bit, insert, overwrite, delete or truncate at a random place, or set a number."""
    at, noise = draw.randrange(len(content)), draw.randbytes(draw.randrange(1, 20))
    size, aligned = draw.choice([1, 2, 4, 8]), at & ~7
    number = draw.choice([0, 1, -1, 255, 2**15, 2**30, 2**31 - 1, 2**40, 2**63 - 1]) % 256**size
    return draw.choice([
        content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
        content[:at] + noise + content[at:],
        content[:at] + noise + content[at + len(noise) :],
        content[:aligned] + number.to_bytes(size, "little") + content[aligned + size :],
        content[:at] + content[at + len(noise) :],
        content[:at],
    ])  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_a_changed_file_ends_with_a_known_code_and_one_line(name, here):
    file = here / name
    whole = file.read_bytes()
    assert vil(*TARGETS[name]).code == 0
    restore = keep_run(here) if name == STATE else lambda: None

    def try_input(draw):
        restore()
        file.write_bytes(change(whole, draw))
        if name == STATE:
            seal(file)
        return problem_of(vil(*TARGETS[name]))

    fuzz(name, try_input)


def keep_run(here):
    """Return a function that restores the run, which has been resumed."""
    shutil.rmtree(max((here / "run/checkpoints").glob("step-*")))
    for link in ("last", "best"):
        (here / "run/checkpoints" / link).write_text("step-00000001\n")
    shutil.copytree(here / "run", here / "kept")

    def restore():
        shutil.rmtree(here / "run")
        shutil.copytree(here / "kept", here / "run")

    return restore


def seal(file):
    """Make the manifest of a checkpoint valid again."""
    manifest = json.loads((file.parent / MANIFEST).read_text())
    manifest["files"][file.name] = fingerprint(file)
    (file.parent / MANIFEST).write_text(json.dumps(manifest))
    (file.parent / MANIFEST_HASH).write_text(hash_manifest(file.parent))


# Files of which every byte is valid, but a value is not: these files have no checksum.

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
    """Replace one value in nested dicts and lists, or remove it."""
    holder = content
    while True:
        key = draw.choice(range(len(holder)) if isinstance(holder, list) else list(holder))
        if not (isinstance(holder[key], dict | list) and holder[key]) or draw.random() < 0.1:
            break
        holder = holder[key]
    if isinstance(holder[key], torch.Tensor) and draw.random() < 0.8:
        holder[key] = draw.choice(TENSORS)(holder[key].float())
    elif draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(VALUES)


def change_json(name):
    def make(draw):
        content = json.loads(Path(name).read_text())
        replace_value(content, draw)
        Path(name).write_text(json.dumps(content))

    return make


def change_card(draw):
    card = read_metadata("weights.safetensors")
    replace_value(card, draw)
    write_weights("weights.safetensors", load_file("weights.safetensors"), card)


def change_weights(draw):
    content = torch.load("weights.pth")
    replace_value(content, draw)
    torch.save(content, "weights.pth")


def change_state(draw):
    content = torch.load(STATE)
    replace_value(content, draw)
    torch.save(content, STATE)
    seal(Path(STATE))


CHANGES = {  # file -> (function that changes a value in it, the command that reads it)
    "weights.safetensors": (change_card, TARGETS["weights.safetensors"]),
    "weights.pth": (change_weights, TARGETS["weights.pth"]),
    STATE: (change_state, RESUME),
    "cache/attention.json": (change_json("cache/attention.json"), PREDICT),
}
if is_installed("datasets"):
    CHANGES["data/pets/state.json"] = (change_json("data/pets/state.json"), ON_SAVED_SET)
NUM_TARGETS = len(TARGETS) + len(CHANGES) + 1


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_ends_with_a_known_code_and_one_line(name, here):
    make, words = CHANGES[name]
    whole = Path(name).read_bytes()
    assert vil(*words).code == 0
    restore = keep_run(here) if name == STATE else lambda: Path(name).write_bytes(whole)

    def try_input(draw):
        restore()
        make(draw)
        return problem_of(vil(*words))

    fuzz(f"a value in {name}", try_input)


@needs_compiler
def test_a_changed_library_is_never_loaded(here):
    assert library.prepare() == []
    file = library.path(library._instructions())
    whole = file.read_bytes()

    def try_input(draw):
        changed = change(whole, draw)
        copy = here / "library.so"
        copy.write_bytes(changed)
        return "" if changed == whole or not build.is_complete(copy) else "complete"

    fuzz("the compiled library", try_input)
