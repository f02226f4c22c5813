"""Configs and data from somebody else never run code, and never lead to files elsewhere.

Every payload would create the folder `canary`. Each file is refused with one line and the
documented exit code or, where the docs say so, skipped or not read.
"""

import os
import pickle
import re
from pathlib import Path

import pytest

from tests.common.data_files import samples, write_folder, write_tsv
from tests.common.small_runs import SMALL, vil

pytestmark = pytest.mark.trust(9)

USAGE, DATA = 2, 3


class Payload:
    """An object that creates the canary when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (os.path.abspath("canary"),)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Check that payloads work when they are run."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Payload()))
    os.rmdir("canary")


def refused(ended, code, said):
    """The last line of stderr says what is wrong, and no payload ran."""
    assert ended.code == code, ended.err
    assert re.search(said, ended.err.splitlines()[-1]), ended.err
    assert not Path("canary").exists()


# Configs


MAKE = "!!python/object/apply:os.mkdir [canary]"
CALL = "(__import__('os').mkdir('canary'), 1)"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)
)
CONFIGS = {
    "object": (f"OPTIM: {MAKE}", "tags are not allowed"),
    "object as a value": (f"OPTIM:\n  LR: {MAKE}", "x.yaml:2: .*tags are not allowed"),
    "object as a key": (f"? {MAKE}\n: 1", "tags are not allowed"),
    "object in the second document": (f"OPTIM: {{}}\n---\n{MAKE}", "not allowed|not valid YAML"),
    "new object": ("OPTIM: !!python/object/new:os.mkdir [canary]", "tags are not allowed"),
    "name": ("OPTIM: {LR: !!python/name:os.mkdir ''}", "tags are not allowed"),
    "own tag": (
        "%TAG ! tag:yaml.org,2002:python/\n---\nOPTIM: !name:os.mkdir ''",
        "are not allowed",
    ),
    "expression": (f'AUG: {{SCALE: "{CALL}"}}', "AUG.SCALE: expected tuple of float"),
    "key twice": ("OPTIM:\n  LR: 1\n  LR: 2", "OPTIM.LR: given twice"),
    "section twice": ("OPTIM: {LR: 1}\nOPTIM: {LR: 2}", "OPTIM: given twice"),
    "merged key": ("OPTIM: &a {LR: 1}\nSOLVER: {<<: *a}", "SOLVER.<<"),
    "bomb of aliases": (BOMB, "too large after its aliases are expanded"),
    "alias to itself": ("DATA: &a {KWARGS: *a}", "too large"),
    "depth": ("DATA: {KWARGS: {a: " + "[" * 5000, "nest"),
    "size": ("#" * (1 << 20) + "\n", "has more than"),
    "base of the system": ("_BASE_: ../../../etc/passwd", "the name of a config must end in"),
    "base that is a link": ("_BASE_: link.yaml", "is outside of"),
    "base above": ("_BASE_: ../theirs/secret.yaml", "is outside of"),
    "base that is code": ("_BASE_: code.py", "the name of a config must end in"),
    "base of bases": ("_BASE_: x.yaml", "include each other"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name):
    for folder in ("mine", "theirs"):
        os.mkdir(folder)
    Path("theirs/secret.yaml").write_text("OPTIM: {LR: 2}")
    Path("mine/link.yaml").symlink_to(Path("theirs/secret.yaml").resolve())
    Path("mine/code.py").write_text("import os\nos.mkdir('canary')\n")
    text, said = CONFIGS[name]
    Path("mine/x.yaml").write_text(text)
    refused(vil("train", "--config-file", "mine/x.yaml"), USAGE, said)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (f"AUG.SCALE={CALL}", "expected tuple of float"),
        (f"DATA.KWARGS={{a: {MAKE}}}", "tags are not allowed"),
        (f"DATA.TRAIN=[{MAKE}]", "tags are not allowed"),
    ],
)
def test_command_lines(word, said):
    refused(vil("train", word), USAGE, said)


# Data


TEN = (*SMALL, "DATA.NUM_CLASSES=10", "DATALOADER.BSZ=5", "OPTIM.EPOCHS=1")


def train_on(name, *words):
    sets = (f"DATA.TRAIN=[{name}]", f"DATA.TEST=[{name}]")
    return vil("train", *TEN, *sets, *words, "--data", "data", "--output_dir", "out")


def test_pickles_of_cifar():
    folder = Path("data/cifar-10-batches-py")
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(Payload()))
    refused(train_on("cifar"), DATA, "cifar-10-batches-py is missing or incomplete")


TSV = {
    "object": (f"img: {MAKE}", "cannot be read"),
    "system": ("img: /etc/passwd", "names /etc/passwd, which is not below data"),
    "above": ("img: ../secret.txt", "secret.txt, which is not below data"),
    "bottomless": (f"img: {'[' * 5000}", "cannot be read"),
    "bomb": (f"{BOMB}\nimg: *a9", "img must be the path of a file"),
}


@pytest.mark.parametrize("name", TSV)
def test_descriptions_of_tsv_files(name):
    os.mkdir("data")
    text, said = TSV[name]
    Path("data/train.yaml").write_text(text)
    refused(train_on("tsv"), DATA, said)


def test_a_class_mapping_that_nests_too_deep():
    os.mkdir("data")
    for split in ("train", "val"):
        write_tsv(Path("data"), split, samples(split))
    Path("data/map.json").write_text("[" * 100_000)
    refused(train_on("tsv", "DATA.TARGETMAP=map.json"), DATA, "cannot be read as JSON")


def test_postscript_among_the_images(monkeypatch):
    """Starting Ghostscript for it would create the canary."""
    os.mkdir("data")
    os.mkdir("bin")
    Path("bin/gs").write_text(f"#!/bin/sh\nmkdir {os.path.abspath('canary')}\necho 10.0\n")
    Path("bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", os.path.abspath("bin"), prepend=os.pathsep)
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    for split in ("train", "val"):
        write_folder(Path("data"), split, samples(split) | {"c0/0.png": program})
    refused(train_on("folder"), DATA, "cannot be read, more than the allowed")
