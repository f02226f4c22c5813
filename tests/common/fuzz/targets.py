"""What is fuzzed: valid files and command lines of every kind, and what must hold after any change.

A case is a target's name and a list of changes. It runs in a folder of its own with the target's
files, a folder `outside` that nothing may touch, and `out` for what the command writes.
"""

import fnmatch
import glob
import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from tests.common.data_files import samples, write_folder, write_tar, write_tsv, write_zip
from tests.common.fuzz.fork_server import Ended
from tests.common.fuzz.mutations import Change, apply, change_words
from tests.common.small_runs import TINY, succeeds
from vil.config.defaults import KEYS
from vil.tasks import TASKS

CODES = (0, 2, 3, 4, 5)  # of vil/utils/errors.py; 1 is an error that nobody expected
MEMORY = 2 << 30
WARNING = re.compile(r"^(WARNING |\S.*: \w*Warning: )")
NOTES = ("weights of ", "the shipped ")  # which weights predict
LOADED_HERE = "DATALOADER.WORKERS=0"
SMALLEST = (*TINY, LOADED_HERE, "DATA.KWARGS.n=16")
RUN = ("evaluate", "--run", "run")
ON_DATA = (*RUN, "--data", "data", LOADED_HERE, "DATA.CLASSES=by_position")
RESUME = ("train", "--resume", "--output_dir", "run", *SMALLEST, "OPTIM.EPOCHS=2")
FROM_CARD = ("evaluate", "MODEL.MODEL_PATH=weights.safetensors", "DEVICE=cpu", "OUTPUT_DIR=out")
GENERATED = ("DATA.TEST=[fake]", "DATA.KWARGS={n: 8, num_classes: 4}", LOADED_HERE)
TO_TABLE = ("--top", "2", "--format", "csv", "--output-file", "out/found.csv")
CHECKPOINTS = ("run/checkpoints/*", "run/checkpoints/*/*")


class Target(NamedTuple):
    """words: the command line. files: patterns of the files to change; none: the words change.
    may_write: patterns of files that the command may change besides those in `out`."""

    words: tuple[str, ...]
    files: tuple[str, ...] = ()
    may_write: tuple[str, ...] = ("run/eval/*",)


TARGETS = {
    "tsv": Target((*ON_DATA, "DATA.TEST=[tsv]"), ("data/val.*",), ("run/eval/*", "data/*.lineidx")),
    "tar": Target((*ON_DATA, "DATA.TEST=[tar]"), ("data/val.tar",)),
    "zip": Target((*ON_DATA, "DATA.TEST=[imagenet]"), ("data/val.zip", "data/val_map.txt")),
    "folder": Target((*ON_DATA, "DATA.TEST=[folder]"), ("data/val/*/*",)),
    "class mapping": Target(
        (*ON_DATA, "DATA.TEST=[folder]", "DATA.TARGETMAP=map.json"), ("data/map.json",)
    ),
    "weights": Target((*FROM_CARD, *GENERATED), ("weights.safetensors",)),
    "pth": Target((*RUN, "MODEL.MODEL_PATH=weights.pth"), ("weights.pth",)),
    "run": Target(RUN, ("run/*.*", *CHECKPOINTS)),
    "resume": Target(RESUME, ("run/*", *CHECKPOINTS), ("run/*",)),
    "report": Target(("report", "run", "--out", "out/report.html"), ("run/*.*",)),
    "config file": Target(("config", "--config-file", "given.yaml"), ("given.yaml",)),
    "image": Target(("predict", "--run", "run", "images"), ("images/*",)),
    "config value": Target(("config",)),
    "run's value": Target(RUN),
    "evaluate line": Target((*ON_DATA, "DATA.TEST=[folder]")),
    "predict line": Target(("predict", "images/a.png", "--run", "run", *TO_TABLE)),
    "convert line": Target(("convert", "run", "out/x.safetensors", "--checkpoint", "last")),
    "report line": Target(("report", "run", "--out", "out/report.html", LOADED_HERE)),
    "info line": Target(("info", "--config-file", "given.yaml", "DEVICE=cpu")),
}
if "detection" in TASKS:
    TARGETS["coco"] = Target(
        ("detect", "check", "data/coco.json", "--images", "data/images", "--list", "out/list.txt"),
        ("data/coco.json", "data/images/*"),
    )


def write_inputs(root: Path) -> Path:
    """Write the files of all targets, with a trained run; returns the root."""
    (root / "outside").mkdir(parents=True)
    (root / "outside/secret").write_text("secret\n")
    (root / "out").mkdir()
    succeeds("train", "--output_dir", root / "run", *SMALLEST, "OPTIM.EPOCHS=1")
    succeeds("convert", root / "run", root / "weights.safetensors")
    write_pth(root)
    (root / "given.yaml").write_text((root / "run/config.yaml").read_text())
    files = {name: data for name, data in samples("val", 2).items() if int(name[1]) < 4}
    (root / "data").mkdir()
    for write in (write_folder, write_tar, write_zip, write_tsv):
        write(root / "data", "val", files)
    (root / "data/map.json").write_text('{"0": "c0", "1": "c1(x)", "2": "c2", "3": "c3(y)"}')
    (root / "images").mkdir()
    for name in ("a.png", "b.jpg", "c.tif", "d.bmp", "e.webp"):
        Image.new("RGB", (20, 30), (200, 100, 50)).save(root / "images" / name)
    if "detection" in TASKS:
        from tests.common.detection.coco_files import box, write

        folder, file = write(root / "data", [box(1), box(2, image=2)])
        folder.rename(root / "data/images")
        file.rename(root / "data/coco.json")
    return root


def write_pth(root: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save({"net": load_file(root / "weights.safetensors")}, root / "weights.pth")


def prepare(target: Target, changes: list[Change], inputs: Path, folder: Path) -> list[str]:
    """Copy the inputs to `folder`, apply the changes, and return the command line."""
    shutil.copytree(inputs, folder, symlinks=True)
    words = list(target.words)
    if target.files:
        files = sorted(file for pattern in target.files for file in folder.glob(pattern))
        for change in changes:
            apply(change, [file for file in files if file.exists()], folder / "outside")
        return words
    for change in changes:
        if change.kind % 2 and target.words[0] in ("config", "evaluate"):
            words.append(f"{sorted(KEYS)[change.file % len(KEYS)]}=1")
        words = change_words(words, change)
    return words or ["--help"]  # without a word, the list of commands is printed


def state(folder: Path) -> dict[str, str]:
    """Return {path: what it is} of everything below a folder."""
    return {str(path.relative_to(folder)): describe(path) for path in sorted(folder.rglob("*"))}


def describe(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    if not path.is_file():
        return "folder" if path.is_dir() else "special"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def problems(
    target: Target, words: list[str], ended: Ended, before: dict, after: dict
) -> list[str]:
    """Return what is wrong with the end of a case; nothing if the invariant holds."""
    found = []
    if ended.code not in CODES:
        found.append(f"exit code {ended.code}")
    if "Traceback" in ended.err + ended.out:
        found.append("a traceback")
    said = errors_in(ended.err)
    drawn = said and said[0].endswith("Expected:")  # a drawing of the layout follows
    if (len(said) > 1 and not drawn) or (ended.code and not said):
        found.append(f"{len(said)} lines on stderr")
    if ended.memory > MEMORY:
        found.append(f"{ended.memory >> 20} MiB of memory")
    may_write = ("out/*", "run/eval", "run/crash*", *target.may_write)
    if not target.files:  # a changed command line may name another output
        named = [glob.escape(word.partition("=")[2] or word) for word in words]
        may_write += (*named, *(f"{name}/*" for name in named))
    for path in sorted(before.keys() | after.keys()):
        allowed = any(fnmatch.fnmatch(path, pattern) for pattern in may_write)
        if before.get(path) != after.get(path) and not allowed:
            found.append(f"{path} changed")
    return found


def errors_in(text: str) -> list[str]:
    """Return the lines on stderr that are neither warnings nor notes. Python's warnings have two
    lines, the second one with code."""
    lines = text.splitlines()
    return [
        line
        for previous, line in zip(["", *lines], lines)
        if not (WARNING.match(line) or line.startswith(NOTES))
        and not (line.startswith("  ") and WARNING.match(previous))
    ]


def run_case(
    name: str, changes: list[Change], inputs: Path, folder: Path,
    run: Callable[[list[str], Path], Ended],
) -> str:  # fmt: skip
    """Run one case in `folder`, which is removed; returns what is wrong with it, if anything."""
    target = TARGETS[name]
    words = prepare(target, changes, inputs, folder)
    before = state(folder)
    try:
        ended = run(words, folder)
        found = problems(target, words, ended, before, state(folder))
    finally:
        shutil.rmtree(folder)
    return "; ".join(found) and f"{found}: vil {' '.join(map(repr, words))}\n{ended.err[-2000:]}"
