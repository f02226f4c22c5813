"""Benchmarks that keep their runs read a finished run again, and train one that was interrupted."""

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts, not part of the package
resizing = importlib.import_module("resizing")


def test_an_interrupted_run_is_no_result(tmp_path, capsys):
    run = tmp_path / "source0"
    run.mkdir()
    point = {"step": 9, "epoch": 1.0, "split": "val/digits", "top1": 90.0}
    (run / "metrics.jsonl").write_text(json.dumps(point) + "\n")
    (run / "config.yaml").touch()
    (run / "status.json").write_text('{"state": "finished"}')
    assert resizing.finish(resizing.CONFIG, run) == 90.0
    (run / "status.json").write_text('{"state": "running"}')
    with pytest.raises(SystemExit, match="vil train of digits/vil_nano.yaml failed"):
        resizing.run(Namespace(epochs="none", json=None), tmp_path)
    assert "OPTIM.EPOCHS" in capsys.readouterr().err
