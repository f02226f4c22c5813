"""Broken images and dying workers, in real runs."""

import json
import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest

from tests.common.bad_images import BAD, GOOD
from tests.common.data_files import png_bytes
from tests.common.faults.real_runs import begin, end_all, said, status, wait_for_end
from tests.common.faults.records import record
from tests.common.small_runs import SMALL, TINY, checkpoint, figures, metrics, vil
from vil.data.robust_dataset import RobustDataset

AROUND = str(Path(__file__).parents[1] / "common/faults/injected_around.py")
DATA = 3
pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")


def begin_with(folder, *words, **fault):
    """Start a run with a fault of injected_around.py."""
    return begin(folder, *words, "--import", AROUND, FAULT=json.dumps(fault))


def weights(folder) -> bytes:
    return (checkpoint(folder) / "model.safetensors").read_bytes()


# Images


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


def test_f13_broken_images(pictures, tmp_path):
    listed = {f"train/dog/{name}" for name in BAD} | {"val/cat/cut.png"}
    folders = {tmp_path / str(number): 2 * (number // 2) for number in range(4)}
    finished = right = 0
    for folder, workers in folders.items():
        process = begin(folder, *BROKEN, "--data", pictures, f"DATALOADER.WORKERS={workers}")
        wait_for_end(process)
        assert process.returncode == 0, said(folder)
        finished += [line["step"] for line in metrics(folder, "train")] == list(range(1, 21))
        names = [line.split("\t")[0] for line in bad_samples(folder)]
        right += sorted(names) == sorted(listed)
        assert metrics(folder, "val")[-1]["count"] == 19
    alike = {(weights(folder), str(figures(metrics(folder)))) for folder in folders}
    record("F13", "runs with 0 and 2 workers that complete all steps (of 4)", finished, 4)
    what = "runs whose bad_samples.txt lists each broken image once and no valid one (of 4)"
    record("F13", what, right, 4)
    record("F13", "differences in weights or metrics among the 4 runs", len(alike) - 1, 0)


def bad_samples(folder):
    return Path(folder, "bad_samples.txt").read_text().splitlines()


# Dying workers


DEATHS = [("exit", True), ("SIGKILL", True), ("SIGKILL", False), ("exit", False), ("SIGBUS", True)]


def test_f14_a_worker_dies(tmp_path):
    named, orphans = 0, 0
    for number, (how, training) in enumerate(DEATHS):
        folder, file = tmp_path / str(number), tmp_path / f"{number}.died"
        words = (*TINY, f"DATALOADER.WORKERS={1 + number % 2}")
        fault = dict(what="worker", how=how, training=training, file=str(file))
        process = begin_with(folder, *words, **fault)
        wait_for_end(process)
        pid = file.read_text()
        line = said(folder).splitlines()[-1].strip("\0")  # which torch's own words end with
        text = rf"vil train: a DataLoader process died: worker \(pid.* {pid}\) .*DATALOADER\.BSZ"
        fits = re.match(text, line)
        right = process.returncode == status(folder)["code"] == DATA
        named += right and bool(fits) and "Traceback" not in said(folder)
        orphans += end_all(process)
    what = "worker deaths reported in one line that names the worker, with exit code 3 (of 5)"
    record("F14", what, named, 5)
    record("F14", "processes left behind", orphans, 0)


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_f14_outside_of_training(verb, tmp_path, monkeypatch):
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
