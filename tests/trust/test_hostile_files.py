"""Data from somebody else never run code; for configs see tests/config/test_config_files.py.

Every payload would create the folder `canary`. Each file is refused with one line and the
documented exit code or, where the docs say so, skipped or not read.
"""

import os
import pickle
import re
from pathlib import Path

import pytest

from tests.common.data_files import samples, write_folder
from tests.common.small_runs import SMALL, vil

pytestmark = pytest.mark.trust(9)


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


def refused(name, said):
    """Training on the set ends in one line that says what is wrong, and no payload ran."""
    sets = (f"DATA.TRAIN=[{name}]", f"DATA.TEST=[{name}]", "DATA.NUM_CLASSES=10")
    words = (*SMALL, *sets, "DATALOADER.BSZ=5", "OPTIM.EPOCHS=1", "--output_dir", "out")
    ended = vil("train", *words, "--data", "data")
    assert ended.code == 3, ended.err
    assert re.search(said, ended.err.splitlines()[-1]), ended.err
    assert not Path("canary").exists()


def test_pickles_of_cifar():
    folder = Path("data/cifar-10-batches-py")
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(Payload()))
    refused("cifar", "cifar-10-batches-py is missing or incomplete")


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
    refused("folder", "cannot be read, more than the allowed")
