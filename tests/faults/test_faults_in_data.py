"""Broken images and dying workers, in real runs."""

import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest

from tests.common.bad_images import BAD, GOOD
from tests.common.data_files import png_bytes
from tests.common.faults.real_runs import finish, repeats, said, status, variants
from tests.common.small_runs import SMALL, TINY, checkpoint, figures, metrics, vil
from vil.data.robust_dataset import RobustDataset

DATA = 3
pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
BROKEN = (
    *SMALL, "DATA.TRAIN=[folder]", "DATA.TEST=[folder]", "DATA.NUM_CLASSES=2", "DATALOADER.BSZ=18",
    "DATA.MAX_BAD_FRACTION=0.05",
)  # fmt: skip


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """180 training images: 9 broken, 8 unusual but valid (CMYK, wrong extensions, ...), 163 plain;
    and 20 validation images, one of them broken."""
    root = tmp_path_factory.mktemp("pictures")
    plain = {f"{number:03d}.png": png_bytes(number, (40, 36)) for number in range(163)}
    train = {f"{'cat' if number % 2 else 'dog'}/{name}": content
             for number, (name, content) in enumerate([*plain.items(), *GOOD.items()])}  # fmt: skip
    train |= {f"dog/{name}": content for name, content in BAD.items()}
    val = dict(list(train.items())[:19]) | {"cat/cut.png": BAD["cut.png"]}
    for split, files in {"train": train, "val": val}.items():
        for name, content in files.items():
            file = root / split / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    return root


def test_broken_images(pictures, tmp_path):
    """Runs with and without workers complete all steps, are the same, and list each broken image
    once and no valid one."""
    listed = {f"train/dog/{name}" for name in BAD} | {"val/cat/cut.png"}
    ends = []
    for number in range(repeats(4)):
        folder = tmp_path / str(number)
        finish(folder, *BROKEN, "--data", pictures, f"DATALOADER.WORKERS={2 * (number % 2)}")
        assert [line["step"] for line in metrics(folder, "train")] == list(range(1, 21))
        lines = (folder / "bad_samples.txt").read_text().splitlines()
        assert sorted(line.split("\t")[0] for line in lines) == sorted(listed)
        assert metrics(folder, "val")[-1]["count"] == 19
        weights = (checkpoint(folder) / "model.safetensors").read_bytes()
        ends.append((weights, figures(metrics(folder))))
    assert all(end == ends[0] for end in ends)


@pytest.mark.parametrize(
    ("how", "training", "workers"),
    variants(
        [("exit", True, 1), ("SIGKILL", False, 2), ("SIGKILL", True, 2), ("SIGBUS", True, 2)], 2
    ),
)
def test_a_worker_dies(how, training, workers, tmp_path):
    """One line names it, and no process is left behind."""
    folder, file = tmp_path / "run", tmp_path / "died"
    fault = dict(what="worker", how=how, training=training, file=str(file))
    assert finish(folder, *TINY, f"DATALOADER.WORKERS={workers}", code=DATA, fault=fault) == 0
    line = said(folder).splitlines()[-1].strip("\0")  # which torch's own words end with
    pid = file.read_text()
    text = rf"vil train: a DataLoader process died: worker \(pid.* {pid}\) .*DATALOADER\.BSZ"
    assert re.match(text, line)
    assert status(folder)["code"] == DATA
    assert "Traceback" not in said(folder)


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_worker_dies_outside_of_training(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert vil("train", *TINY, "--output_dir", "run").code == 0
    for number in range(3):
        Path(f"{number}.png").write_bytes(png_bytes(number))

    def dying(samples, at):
        assert multiprocessing.parent_process()  # this is a worker
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(RobustDataset, "__getitem__", dying)
    words = ["--images", "0.png", "1.png", "2.png"] if verb == "predict" else []
    ended = vil(verb, "--run", "run", "DATALOADER.WORKERS=1", "DATALOADER.BSZ=2", *words)
    assert ended.code == DATA
    assert f"vil {verb}: a DataLoader process died: worker (pid" in ended.err.splitlines()[-1]
    assert multiprocessing.active_children() == []
