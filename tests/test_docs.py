"""The README is true, its examples run, and every config key does something."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from yacs.config import CfgNode

from vil.cli import COMMANDS, command_of, main
from vil.config.defaults import KEYS
from vil.config.registries import HOMES, registry
from vil.data import build_dataset

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, section: str = "") -> list[str]:
    """The code blocks of a language, in the section of that title or in the whole README."""
    text = README.split(f"## {section}\n")[1].split("\n## ")[0] if section else README
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_file_tree_exists():
    tree = README.split("## Files")[1]
    folders = []
    for line in tree.split("```")[1].strip().splitlines():
        indent = (len(line) - len(line.lstrip())) // 2
        names = (
            re.match(r" *((?:[\w.]+/?(?:  )?)+)", line)[1].split()
            if indent == 0
            else [line.split()[0]]
        )
        for name in names:
            folders[indent:] = [name]
            assert (ROOT / "/".join(folders)).exists(), "/".join(folders)


def test_the_tree_names_every_room():
    for path in [*(ROOT / "vil").iterdir(), *ROOT.iterdir()]:
        tracked = subprocess.run(
            ["git", "ls-files", str(path)], cwd=ROOT, capture_output=True, text=True
        )
        if path.is_dir() and not path.name.startswith((".", "_")) and tracked.stdout:
            assert f"{path.name}/" in README.split("## Files")[1], path.name


def test_commands_exist():
    lines = [line.split("#")[0] for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) > 8
    for line in filter(None, map(str.strip, lines)):
        words = shlex.split(line)
        if words[0] == "vil":
            assert command_of(words[1:])[0] in COMMANDS
        elif words[0] == "torchrun":
            assert (ROOT / next(word for word in words if word.endswith(".py"))).exists()
        else:
            assert (ROOT / words[0]).exists(), words[0]
        for at, word in enumerate(words[:-1]):
            if word == "--config-file":
                assert (ROOT / "configs" / words[at + 1]).exists(), words[at + 1]
            elif re.fullmatch(r"[A-Z_]+(\.[A-Z_0-9]+)+", word):
                assert word in KEYS, word


PAGES = ["README.md", "docs/weights.md", "docs/migrating.md", "docs/detection.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_library_examples_run(page, tmp_path):
    """All of a page in one process: a later one may use what an earlier one made."""
    text = (ROOT / page).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    assert len(code) > 200
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)


@pytest.mark.long
def test_training_on_a_folder_of_images(tmp_path):
    """The walk-through, word for word but for fewer epochs, on a generated folder."""
    for split, count in (("train", 40), ("val", 5)):
        images = build_dataset("fake", ".", split, n=3 * count, size=48, num_classes=3)
        for number in range(len(images)):
            image, target = images[number]
            path = tmp_path / "photos" / split / f"class{target}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            assert isinstance(image, Image.Image)
            image.save(path)
    commands = blocks("bash", "Train on my own folder of images")[0].strip().splitlines()
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command.replace("OPTIM.EPOCHS 10", "OPTIM.EPOCHS 2"))
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs/photos/plots/accuracy.png").exists()
    assert re.search(r"val set folder loss .* count 15", done.stdout)
    assert re.search(r"class2 +\d/5", done.stdout)


DETECTOR = (
    "DETECTION.MODEL=mask_rcnn", "DETECTION.FPN.STAGES=[1]", "DETECTION.ANCHORS.SIZES=[32,64]",
    "DATA.KWARGS={n: 2, size: 32, num_classes: 10}", "DATALOADER.BSZ=2", "AUG.MIXUP_PROB=0",
    "DATA.TRAIN=fake_boxes", "DATA.TEST=fake_boxes",
)  # fmt: skip


@pytest.mark.defect("B36")
@pytest.mark.long
def test_every_key_is_read_or_said_to_do_nothing(tmp_path, monkeypatch):
    """Train and evaluate once, noting which keys are asked for: the rest is dead."""
    names, asked, kept, plain = {}, set(), [], CfgNode.__getattr__

    def watched(node: CfgNode, name: str):
        value = plain(node, name)
        key = names.get(id(node), "") + name
        asked.add(key)
        if isinstance(value, CfgNode):
            names[id(value)] = f"{key}."
            kept.append(value)  # alive, so that no id is given away twice
        return value

    monkeypatch.setattr(CfgNode, "__getattr__", watched)
    data = ["DATA.TRAIN=fake", "DATA.TEST=fake", "DATA.NUM_CLASSES=10", "DATALOADER.BSZ=8"]
    data += ["DATA.KWARGS={n: 16, size: 32, num_classes: 10}"]
    model = ["INPUT.IMAGE_SIZE=32", "MODEL.VIT.MSVIT.ARCH=l1,d8,h1,p8", "OPTIM.EPOCHS=1"]
    switches = ["AUG.MIXUP_PROB=1", "AUG.MIXUP=0.8", "AMP.ENABLED=True", "FINETUNE.FINETUNE=True"]
    words = ["train", "--output_dir", str(tmp_path), *data, *model, *switches]
    assert main(words) == main([*words, "--resume"]) == 0
    assert main(["evaluate", "--run", str(tmp_path)]) == 0
    found = ["--output_dir", str(tmp_path / "found"), f"DATA.PATH={tmp_path}"]
    assert main([*words, *found, *DETECTOR]) == 0
    components = (entry for kind in HOMES for entry in registry(kind).values())
    theirs = {key for entry in components for key in entry.key_names.values()}
    unread = {key for key in KEYS if key not in asked} - {"VERSION", "IMPORTS"} - theirs
    assert unread == {name for name, key in KEYS.items() if key.ignored}


@pytest.mark.parametrize(
    "path",
    ["docs/attention.md", "docs/config.md", "docs/pattern.png", "CONTRIBUTING.md", "LICENSE"],
)
def test_linked_files_exist(path):
    assert (ROOT / path).exists()
    assert path in README or path in ("CONTRIBUTING.md", "LICENSE")
