"""`vil.train(..., on_evaluation=...)`: a caller's own logging."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vil
from tests.common.small_runs import TINY, environment


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return vil.train(None, TINY, output_dir=tmp_path_factory.mktemp("runs") / "plain")


def weights(result):
    return load_file(result.last_checkpoint / "model.safetensors")


def assert_same_weights(result, other):
    ours, theirs = weights(result), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_it_gets_each_evaluation_and_changes_nothing(plain, tmp_path):
    found = []

    def log(evaluation):
        random.random(), np.random.rand(), torch.rand(3)
        found.append(evaluation)
        folder = evaluation.run_dir / f"checkpoints/step-{evaluation.step:08d}"
        assert folder.is_dir()  # saved before
        return True

    result = vil.train(None, TINY, output_dir=tmp_path / "run", on_evaluation=log)
    assert_same_weights(result, plain)
    points = result.history("val/fake")
    assert [(each.step, each.epoch) for each in found] == [(p["step"], p["epoch"]) for p in points]
    for each, point in zip(found, points):
        (metrics,) = each.metrics.values()
        assert all(type(value) is float and point[name] == value for name, value in metrics.items())
        assert {"top1", "loss"} <= metrics.keys()
        assert each.run_dir == tmp_path / "run"
    assert [each.step for each in found if each.is_best][-1] == result.best_step
    best = [each.metrics["fake"]["top1"] for each in found if each.is_best]
    assert best == sorted(set(best))
    found.clear()
    vil.train(output_dir=tmp_path / "run", resume=True, on_evaluation=log)
    assert found == []  # no evaluation is left


def test_its_exception_ends_the_run_which_can_be_resumed(plain, tmp_path):
    calls = []

    def fail(evaluation):
        calls.append(evaluation.step)
        if len(calls) == 1:
            raise LookupError("the server of the caller is gone")

    with pytest.raises(LookupError, match="the server of the caller"):
        vil.train(None, TINY, output_dir=tmp_path / "run", on_evaluation=fail)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"] == "LookupError: the server of the caller is gone"
    assert status["step"] == calls[-1]
    assert status["checkpoint"].endswith(f"step-{calls[-1]:08d}")
    result = vil.train(output_dir=tmp_path / "run", resume=True, on_evaluation=fail)
    assert_same_weights(result, plain)
    assert calls == sorted(set(calls))  # no evaluation is repeated
    assert calls[-1] == result.step


SCRIPT = """
import os, sys, vil
def log(evaluation):
    with open(os.path.join(sys.argv[1], os.environ["RANK"]), "a") as file:
        print(evaluation.step, file=file)
vil.train(None, {settings!r}, output_dir=os.path.join(sys.argv[1], "run"), on_evaluation=log)
"""


@pytest.mark.long
def test_with_two_processes_the_first_one_calls_it(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(settings=list(TINY)))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = [sys.executable, *words, str(tmp_path / "train.py"), str(tmp_path)]
    subprocess.run(words, env=environment(), check=True, timeout=300)
    assert (tmp_path / "0").read_text().split() == ["4", "8"]
    assert not (tmp_path / "1").exists()
