"""Malicious files never run code, and never lead to files elsewhere.

Every payload would create the folder `canary`. Each file is refused with one line and the
documented exit code or, where the docs say so, skipped or not read.
"""

import io
import json
import os
import pickle
import re
import shutil
import stat
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from tests.common.data_files import png_bytes, samples, write_folder, write_map, write_tsv
from tests.common.faults.real_runs import really
from tests.common.faults.records import record
from tests.common.small_runs import SMALL, TINY, Outcome, vil
from vil.engine.checkpoint.manifest import MANIFEST, MANIFEST_HASH, fingerprint, hash_manifest

USAGE, DATA, CHECKPOINT = 2, 3, 4


class Payload:
    """An object that creates the canary when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (os.path.abspath("canary"),)


STATE = {"head.weight": torch.ones(4, 32), "note": Payload()}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Check that payloads work when they are run."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Payload()))
    os.rmdir("canary")


class Tally:
    """Count the files that were tried and those refused with one line, and print the others."""

    def __init__(self):
        self.tried = self.refused = 0

    def judge(self, name, ended, code, said):
        ran = Path("canary").exists()
        one_line = re.search(said, ended.err) and ended.err.count("\n") == 1
        fine = ended.code == code and one_line and not ran
        self.tried += 1
        self.refused += bool(fine)
        if not fine:
            print(f"{name}: {ended.code}, not {code}; {said!r} in {ended.err}; payload ran: {ran}")

    def record(self, what):
        record("F16", f"{what} refused without running their payload", self.refused, self.tried)


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


def test_f16_configs():
    """Each in its own process."""
    for folder in ("mine", "theirs"):
        os.mkdir(folder)
    Path("theirs/secret.yaml").write_text("OPTIM: {LR: 2}")
    Path("mine/link.yaml").symlink_to(Path("theirs/secret.yaml").resolve())
    Path("mine/code.py").write_text("import os\nos.mkdir('canary')\n")
    tally = Tally()
    for name, (text, said) in CONFIGS.items():
        Path("mine/x.yaml").write_text(text)
        ended = really("train", "--config-file", "mine/x.yaml")
        tally.judge(name, ended, USAGE, said)
    for words, said in (
        (["--config-file", "mine/code.py"], "the name of a config must end in"),
        ([f"AUG.SCALE={CALL}"], "expected tuple of float"),
        ([f"DATA.KWARGS={{a: {MAKE}}}"], "tags are not allowed"),
        ([f"DATA.TRAIN=[{MAKE}]"], "tags are not allowed"),
    ):
        tally.judge(words, really("train", *words), USAGE, said)
    Path("mine/config.yaml").write_text(f"OPTIM: {MAKE}")
    ended = really("train", "--output_dir", "mine", "--resume")
    tally.judge("config of a run", ended, USAGE, "tags are not allowed")
    tally.record("configs")


# Weights


def old_tar(file):
    with tarfile.open(file, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            add(archive, name, pickle.dumps(Payload(), protocol=2))


def torch_script(file):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.ReLU()), file)


def of_another_library(folder):
    """Write a torch.distributed.checkpoint folder, whose reader unpickles .metadata."""
    os.mkdir(folder)
    Path(folder, ".metadata").write_bytes(pickle.dumps(Payload()))
    Path(folder, "__0_0.distcp").write_bytes(b"")


WEIGHTS = {
    "a.pt": lambda file: torch.save(STATE, file),
    "old.pt": lambda file: torch.save(STATE, file, _use_new_zipfile_serialization=False),
    "older.pt": old_tar,
    "nested.pt": lambda file: torch.save({"model": {"a": [Payload()]}}, file),
    "module.pth": lambda file: torch.save(torch.nn.Linear(2, 2), file),
    "script.pt": torch_script,
    "plain.pt": lambda file: Path(file).write_bytes(pickle.dumps(STATE, protocol=2)),
    "newer.pt": lambda file: Path(file).write_bytes(pickle.dumps(STATE, protocol=5)),
    "a.safetensors": lambda file: Path(file).write_bytes(pickle.dumps(Payload())),
    "b.safetensors": lambda file: Path(file).write_bytes((1 << 62).to_bytes(8, "little")),
    "folder": of_another_library,
}


def test_f16_weights():
    tally = Tally()
    for number, (name, write) in enumerate(WEIGHTS.items()):
        write(name)
        for verb in ("train", "evaluate"):
            run = really if number == 0 else vil
            ended = run(verb, *TINY, f"MODEL.MODEL_PATH={name}", "--output_dir", "out")
            tally.judge(f"{verb} {name}", ended, CHECKPOINT, rf"{name} is damaged,? or ")
    assert not Path("out").exists()
    tally.record("weights")


# Checkpoints and runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one epoch, of which copies are tampered with."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert vil("train", *TINY, "OPTIM.EPOCHS=1", "OPTIM.EMA=0.9", "--output_dir", folder).code == 0
    return folder


def copied(whole) -> Path:
    """Copy the run to `run`. Returns the path of its checkpoint."""
    shutil.rmtree("run", ignore_errors=True)
    shutil.copytree(whole, "run", symlinks=True)
    return Path("run/checkpoints/step-00000004")


def forge(folder, **files):
    """Write a manifest and checksum that match the folder's current files and `files`."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in manifest["files"]:
        manifest["files"][name] = fingerprint(folder / name)
    manifest["files"] |= files
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (folder / MANIFEST_HASH).write_text(hash_manifest(folder))


def pickled(name, write):
    def tamper(folder):
        write(folder / name)
        forge(folder)

    return tamper


RESUMED = {
    "state as a zip": pickled("state.pt", lambda file: torch.save(STATE, file)),
    "state as a pickle": pickled("state.pt", lambda f: f.write_bytes(pickle.dumps(STATE, 2))),
    "state as a tar": pickled("state.pt", old_tar),
    "state of nothing": pickled("state.pt", lambda file: torch.save([1], file)),
    "weights as a pickle": pickled("model.safetensors", WEIGHTS["plain.pt"]),
    "average as a pickle": pickled("ema.safetensors", WEIGHTS["plain.pt"]),
}


def test_f16_checkpoints(whole, tmp_path):
    tally = Tally()
    for number, (name, tamper) in enumerate(RESUMED.items()):
        tamper(copied(whole))
        run = really if number == 0 else vil
        ended = run("train", "--output_dir", "run", "--resume", "OPTIM.EPOCHS=2")
        tally.judge(name, ended, CHECKPOINT, "cannot be read|is intact")
    RESUMED["average as a pickle"](copied(whole))
    ended = vil("evaluate", "--run", "run", "--checkpoint", "last")
    tally.judge("evaluated average", ended, CHECKPOINT, "damaged")
    tally.record("checkpoints")
    folder = copied(whole)
    of_another_library("theirs")
    for name in (".metadata", "__0_0.distcp"):
        shutil.copy(f"theirs/{name}", folder)
    ended = vil("train", "--output_dir", "run", "--resume", "OPTIM.EPOCHS=2")
    assert ended.code == 0, ended.err
    assert not Path("canary").exists()  # other pickles beside a checkpoint are not read


# Data


TEN = (*SMALL, "DATA.NUM_CLASSES=10", "DATALOADER.BSZ=5", "OPTIM.EPOCHS=1")
CLIMBING = ("../evil.png", "/abs/evil.png", "c0/../../evil.png", "c0/../../../etc/evil.png")


def train_on(name, *words):
    sets = (f"DATA.TRAIN=[{name}]", f"DATA.TEST=[{name}]")
    return vil("train", *TEN, *sets, *words, "--data", "data", "--output_dir", "out")


def add(archive, name, content=b"", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(content))


def hostile_tar(split, whole):
    with tarfile.open(f"data/{split}.tar", "w") as archive:
        for name, content in whole.items():
            add(archive, name, content)
        for name in CLIMBING:
            add(archive, name, png_bytes(1))
        add(archive, "c0/link.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(archive, "c0/hard.png", type=tarfile.LNKTYPE, linkname="../../../etc/passwd")
        add(archive, "c0/device.png", type=tarfile.CHRTYPE, devmajor=1, devminor=3)
        add(archive, "c0/pipe.png", type=tarfile.FIFOTYPE)
    return len(CLIMBING) + 4


def hostile_zip(split, whole):
    link = zipfile.ZipInfo("c0/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(f"data/{split}.zip", "w") as archive:
        for name in (*whole, *CLIMBING):
            archive.writestr(name, whole.get(name) or png_bytes(1))
        archive.writestr(link, "/etc/passwd")
    labels = dict.fromkeys((*CLIMBING, link.filename), 0)
    write_map(Path("data"), split, labels | {name: int(name[1]) for name in whole})
    return len(CLIMBING) + 1 - 2  # hidden members and names that begin with / are never requested


@pytest.mark.parametrize(("name", "write"), [("imagenet", hostile_zip), ("tar", hostile_tar)])
def test_f16_archives(name, write, tmp_path):
    os.mkdir("data")
    for split in ("train", "val"):
        hostile = write(split, {})
    ended = train_on(name)
    assert ended.code == DATA
    assert re.match("vil train: .*(has no images|names no image)", ended.err)
    for split in ("train", "val"):
        write(split, samples(split))
    ended = train_on(name)
    assert ended.code == 0, ended.err
    assert "10 images of 10 classes" in ended.out
    said = re.search(r"train\.\w+: (\d+) members were left out because they are links", ended.out)
    written = [*tmp_path.parent.rglob("evil.png"), *Path("/").glob("*/evil.png")]
    kind = "zip" if name == "imagenet" else "tar"
    record("F16", f"malicious members of a {kind} skipped", int(said[1]), hostile)
    record("F16", f"files extracted from a malicious {kind}", len(written), 0)


def pickles_of_cifar():
    folder = Path("data/cifar-10-batches-py")
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(Payload()))


TSV = {
    "object": (f"img: {MAKE}", "cannot be read"),
    "system": ("img: /etc/passwd", "names /etc/passwd, which is not below data"),
    "above": ("img: ../secret.txt", "secret.txt, which is not below data"),
    "bottomless": (f"img: {'[' * 5000}", "cannot be read"),
    "bomb": (f"{BOMB}\nimg: *a9", "img must be the path of a file"),
}


def test_f16_data(tmp_path, monkeypatch):
    os.mkdir("data")
    tally = Tally()
    pickles_of_cifar()
    tally.judge("cifar", train_on("cifar"), DATA, "cifar-10-batches-py is missing or incomplete")
    Path("secret.txt").write_text("mine\n")
    for name, (text, said) in TSV.items():
        Path("data/train.yaml").write_text(text)
        tally.judge(name, train_on("tsv"), DATA, said)
    for split in ("train", "val"):
        write_tsv(Path("data"), split, samples(split))
    Path("data/map.json").write_text("[" * 100_000)
    ended = train_on("tsv", "DATA.TARGETMAP=map.json")
    tally.judge("target map", ended, DATA, "cannot be read as JSON")
    assert not [*tmp_path.glob("*.lineidx"), *Path("/etc").glob("*.lineidx")]
    postscript(monkeypatch)
    ended = train_on("folder")
    line = Outcome(ended.code, ended.out, ended.err.splitlines()[-1] + "\n")
    tally.judge("PostScript", line, DATA, "cannot be read, more than the allowed")
    tally.record("data")


def postscript(monkeypatch):
    """Add a PostScript file to the images; starting Ghostscript for it creates the canary."""
    os.mkdir("bin")
    Path("bin/gs").write_text(f"#!/bin/sh\nmkdir {os.path.abspath('canary')}\necho 10.0\n")
    Path("bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", os.path.abspath("bin"), prepend=os.pathsep)
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    for split in ("train", "val"):
        write_folder(Path("data"), split, samples(split) | {"c0/0.png": program})
