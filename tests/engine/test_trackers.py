"""Trackers get the metrics of a run: their own local files are read. They never end a training."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.common.small_runs import TINY, vil
from vil.engine import trackers
from vil.engine.logger import RunLogger
from vil.report.run_record import metrics
from vil.utils.errors import ConfigError
from vil.workflows.configure import make_config
from vil.workflows.train import train_config


def train(folder, *names, **options):
    words = [*TINY, f"LOG.TRACKERS=[{','.join(names)}]", "OPTIM.EPOCHS=2"]
    return train_config(make_config(None, words, output_dir=folder), **options)


def losses(folder) -> dict[int, float]:
    lines = metrics(folder / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


def wandb_records(file: Path) -> Iterator:
    """The records of a file of W&B, which has LevelDB's format: 7 bytes, then blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (rest := -at % 32768) < 7:  # no record begins in the last bytes of a block
            at += rest
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            record, whole = Record.FromString(whole), b""
            yield record


def test_tensorboard_is_the_default(tmp_path):
    train_config(make_config(None, TINY, output_dir=tmp_path / "run"))
    events = EventAccumulator(str(tmp_path / "run/tb")).Reload()
    found = {event.step: event.value for event in events.Scalars("loss/train")}
    assert found == pytest.approx(losses(tmp_path / "run"))
    assert not (tmp_path / "run/trackers.json").exists()


def test_none_is_possible(tmp_path):
    train(tmp_path / "run", max_steps=1)
    assert not (tmp_path / "run/tb").exists()
    assert losses(tmp_path / "run")


@pytest.mark.long
def test_mlflow_has_the_metrics_of_a_resumed_run_as_one_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    folder = tmp_path / "run"
    train(folder, "mlflow", max_steps=5)
    train(folder, "mlflow", resume=True)
    (number,) = json.loads((folder / "trackers.json").read_text()).values()
    tracker = trackers.MLflow(folder, 0, {}, number)
    for split in ("val/pets/", "val/./a.csv", "val/../b.csv", "val//c.csv"):
        tracker.log(1, split, {"loss": 2.0})
    tracker.close()
    client = mlflow.MlflowClient()
    history = client.get_metric_history(number, "train/loss")
    assert {point.step: point.value for point in history} == pytest.approx(losses(folder))
    run = client.get_run(number)
    assert run.info.status == "FINISHED"
    assert run.data.params["DATALOADER.BSZ"] == "16"
    assert "val/fake/top1" in run.data.metrics
    written = {f"val/{name}/loss" for name in ("pets", "a.csv", "b.csv", "c.csv")}
    assert written <= run.data.metrics.keys()


@pytest.mark.long
def test_wandb_has_the_metrics_offline(tmp_path):
    pytest.importorskip("wandb")
    words = [*TINY, "LOG.TRACKERS=[wandb]", "--output_dir", str(tmp_path / "run")]
    offline = {**os.environ, "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", "vil", "train", *words]
    subprocess.run(command, env=offline, check=True, capture_output=True, timeout=200)
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")
    found = {}
    for record in wandb_records(file):
        items = {
            item.key or ".".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        if "train/loss" in items:
            found[items["step"]] = items["train/loss"]
    assert found == pytest.approx(losses(tmp_path / "run"))


def test_a_missing_package_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "is_installed", lambda name: name != "wandb")
    with pytest.raises(ConfigError, match=r"wandb needs wandb: pip install 'vil\[trackers\]'"):
        train(tmp_path / "run", "tensorboard", "wandb")
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_named(tmp_path):
    ended = vil("train", *TINY, "LOG.TRACKERS=[tensorbord]", "--output_dir", tmp_path / "run")
    assert ended.code == 2
    assert "LOG.TRACKERS" in ended.err
    assert "tensorboard" in ended.err


def test_a_tracker_that_fails_is_left_out_and_training_goes_on(tmp_path, monkeypatch):
    class Failing:
        run_id = "7"

        def __init__(self, folder, step, config, run_id):
            self.logged = 0

        def log(self, step, split, metrics):
            self.logged += 1
            if self.logged == 2:
                raise RuntimeError("the server\nis gone")

        def close(self):
            raise AssertionError("a tracker that failed is not closed")

        flush = close

    monkeypatch.setitem(trackers.TRACKERS, "wandb", Failing)
    monkeypatch.setattr(trackers, "is_installed", lambda name: True)
    result = train(tmp_path / "run", "wandb", "tensorboard")
    assert result.status == "finished"
    text = (tmp_path / "run/log.txt").read_text()
    assert text.count("WARNING wandb gets no more metrics: RuntimeError: the server") == 1
    assert json.loads((tmp_path / "run/trackers.json").read_text()) == {"wandb": "7"}


def test_a_tracker_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    def refuse(*args):
        raise RuntimeError("no key\nis set")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", refuse)
    with pytest.raises(
        ConfigError, match="LOG.TRACKERS wandb: RuntimeError: no key; WANDB_MODE=offline"
    ):
        trackers.open_trackers(["wandb"], tmp_path, {}, 0)


def test_a_full_disk_is_not_the_end_of_a_tracker(tmp_path, capsys):
    class Full:
        run_id = ""

        def log(self, *args):
            raise OSError("no space left")

        close = flush = log

    logger = RunLogger(tmp_path, enabled=True)
    logger.open_trackers = lambda step: {"tensorboard": Full()}
    logger.begin(0, 4, steps_per_epoch=2, batch_size=1)
    logger.record(1, "train", {"loss": 1.0})
    logger.record(2, "train", {"loss": 1.0})
    assert logger.trackers
    logger.close()
    assert capsys.readouterr().err.count("no space left") == 1
