"""Sweeps in real processes: killed and started again they lose nothing and repeat nothing; a failed
run is recorded and tried again; signals stop them as they stop `vil train`."""

import csv
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vil
from tests.common.small_runs import TINY, checkpoint, command, environment, figures, metrics
from vil.report import run_record

pytestmark = pytest.mark.long
ATTN = "MODEL.VIT.MSVIT.ATTN_TYPE"
COMPONENTS = Path(__file__).parents[1] / "plugins/my_components.py"
# two variants with two seeds
GRID = ("sweep", "--output", "s", *TINY, f"{ATTN}=[full, longformer]", "SEED=[0, 1]")
NAMES = [f"attn_type_{name}-seed_{seed}" for name in ("full", "longformer") for seed in (0, 1)]
DEADLINE = 300


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def begin(*words, **environ):
    """A sweep in a process group of its own."""
    with Path("sweep.log").open("a") as log:
        streams = dict(stdout=log, stderr=log, start_new_session=True)
        return subprocess.Popen(command(*words), env=environment(**environ), **streams)


def run(*words, code=0, **environ) -> str:
    done = subprocess.run(
        command(*words), env=environment(**environ), capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def wait_until(what):
    deadline = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < deadline, Path("sweep.log").read_text()
        time.sleep(0.05)


def status(name, folder="s") -> dict:
    file = Path(folder, "runs", name, "status.json")
    return json.loads(file.read_text()) if file.exists() else {}


def trains_beyond(name, step=0) -> bool:
    """Whether a run has logged a later step."""
    points = run_record.metrics(Path("s/runs", name, "metrics.jsonl"))  # may be half a line
    return any(point["split"] == "train" and point["step"] > step for point in points)


def starts(name, folder="s") -> int:
    """How often a run has started to train."""
    file = Path(folder, "runs", name, "command.txt")
    return len(re.findall(r"^# ", file.read_text(), re.MULTILINE)) if file.exists() else 0


def rows(file="s/runs.csv") -> list[dict]:
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def assert_same_run(mine, other):
    """Every logged number but times, each once, and the last weights, bit for bit."""
    assert figures(metrics(mine)) == figures(metrics(other))
    a, b = (load_file(checkpoint(folder) / "model.safetensors") for folder in (mine, other))
    assert all(torch.equal(a[key], b[key]) for key in b)


def test_killed_midway_and_started_again_it_loses_and_repeats_nothing():
    """SIGKILL to the sweep and its run, in the middle of the second run."""
    words, second = (*GRID, "OPTIM.EPOCHS=6"), NAMES[1]
    sweep = begin(*words)
    wait_until(lambda: any(Path("s/runs", second).glob("checkpoints/step-*/manifest.sha256")))
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.wait()
    assert [status(name).get("state") for name in NAMES] == ["finished", "running", None, None]
    listed = run("sweep", "--output", "s", "--list")
    assert listed.endswith("1 finished, 1 interrupted, 2 pending\n")
    before = Path("s/runs", NAMES[0], "metrics.jsonl").stat()

    assert "1 of 4 runs have finished" in run(*words)
    assert [starts(name) for name in NAMES] == [1, 2, 1, 1]
    assert "resuming from" in Path("s/output", f"{second}.txt").read_text()
    after = Path("s/runs", NAMES[0], "metrics.jsonl").stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    run("train", "--config-file", f"s/configs/{second}.yaml", "--output_dir", "whole")
    assert_same_run(Path("s/runs", second), Path("whole"))
    assert [(row["name"], row["state"]) for row in rows()] == [(n, "finished") for n in NAMES]

    more = run(*words[:3], f"{ATTN}=[full]", "SEED=[2]")
    assert "[5/5] attn_type_full-seed_2 finished" in more
    assert [starts(name) for name in NAMES] == [1, 2, 1, 1]
    summary = [(row["name"], row["seeds"]) for row in rows("s/summary.csv")]
    assert summary == [("attn_type_full", "3"), ("attn_type_longformer", "2")]


def test_a_run_whose_sweep_was_killed_saves_and_ends():
    """SIGKILL to the sweep alone. The next one waits for the run, and resumes it."""
    words = (*GRID[:-2], f"{ATTN}=[full]", "SEED=[0]", "OPTIM.EPOCHS=400", "RUN.SAVE_EVERY=400")
    name, sweep = NAMES[0], begin(*words)
    wait_until(lambda: trains_beyond(name))
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    wait_until(lambda: status(name).get("state") == "preempted")
    step = status(name)["step"]
    assert 0 < step < 1600
    sweep = begin(*words)
    wait_until(lambda: trains_beyond(name, step))
    os.kill(sweep.pid, signal.SIGINT)
    assert sweep.wait(DEADLINE) == 130
    assert f"{name} resumes after step {step}" in Path("sweep.log").read_text()
    assert status(name)["step"] > step


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_the_runs_with_their_state_saved(number, code):
    words = (*GRID, "OPTIM.EPOCHS=400", "RUN.SAVE_EVERY=400", "--jobs", "2")
    sweep = begin(*words, OMP_NUM_THREADS="2")
    wait_until(lambda: all(map(trains_beyond, NAMES[:2])))
    os.kill(sweep.pid, number)
    assert sweep.wait(DEADLINE) == code
    for name in NAMES[:2]:
        assert status(name)["code"] == code
        assert status(name)["step"] > 0
        assert checkpoint(Path("s/runs", name))
        assert "threads 1," in Path("s/runs", name, "env.txt").read_text()
    assert [r["state"] for r in rows()] == ["interrupted"] * 2 + ["pending"] * 2


def test_a_failed_run_is_recorded_and_tried_again():
    """Its data are missing."""
    variants = "{broken: {DATA.TRAIN: [folder]}, sound: {}}"
    Path("g.yaml").write_text(f"variants: {variants}\ngrid: {{SEED: [0]}}\n")
    words = ("sweep", "--grid", "g.yaml", "--output", "s", *TINY, "--data", "photos")
    shown = run(*words, code=3)
    assert "[1/2] broken-seed_0 failed: " in shown
    assert "[2/2] sound-seed_0 finished: top1 " in shown
    broken, sound = rows()
    assert (broken["state"], sound["state"]) == ("failed", "finished")
    assert "photos" in broken["reason"]
    assert "broken-seed_0" in Path("s/summary.md").read_text()
    shown = run(*words, code=3)
    assert "broken-seed_0 failed" in shown
    assert "sound-seed_0" not in shown
    assert starts("sound-seed_0") == 1
    assert len(re.findall(r"^# ", Path("s/output/broken-seed_0.txt").read_text(), re.M)) == 2


def test_from_python_with_an_attention_from_a_file():
    lines = []
    result = vil.sweep(
        None, TINY, output_dir="s", grid={"OPTIM.EPOCHS": [1]}, imports=[str(COMPONENTS)],
        variants={"halved": {ATTN: "halved"}, "full": {ATTN: "full"}}, say=lines.append,
    )  # fmt: skip
    assert (result.status, result.code) == ("finished", 0)
    assert [row.name for row in result.rows] == ["halved-epochs_1", "full-epochs_1"]
    for row in result.runs:
        assert row.metric == metrics(result.folder / "runs" / row.name, "val")[-1]["top1"]
        assert row.images_per_second > 0
        assert row.memory_mib > 100
    assert result.rows[0].parameters > 0
    assert len(lines) == 4
    assert vil.sweep(output_dir="s").status == "finished"


def test_two_processes_for_a_run_and_one_task_of_an_array():
    words, nowhere = (*GRID[:-2], "SEED=[0, 1]", "OPTIM.EPOCHS=1"), "/nowhere"
    shown = run(*words, "--slurm=--time=1:00:00", PATH=nowhere)
    assert "on the cluster: sbatch s/sweep.sbatch" in shown
    assert "--array=0-1\n" in Path("s/sweep.sbatch").read_text()
    run("sweep", "--output", "s", "--task", "1", "--nproc", "2")
    assert "ranks 2," in Path("s/runs/seed_1/env.txt").read_text()
    assert [row["state"] for row in rows()] == ["pending", "finished"]
    run(*words, "--slurm", PATH=nowhere)
    assert "--array=0\n" in Path("s/sweep.sbatch").read_text()


def test_a_task_of_an_array_saves_and_is_requeued(tmp_path):
    """The script in a shell, with the variables of SLURM and a scontrol that prints its words."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text("#!/bin/sh\necho scontrol $*\n")
    (tmp_path / "bin/scontrol").chmod(0o755)
    own = dict(SLURM_ARRAY_TASK_ID="1", SLURM_JOB_ID="7", PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    words = (*GRID[:-2], "SEED=[0, 1]", "RUN.SAVE_EVERY=400")
    run(*words, "OPTIM.EPOCHS=400", "--slurm", PATH="/nowhere")
    with open("task.log", "w") as log:
        task = subprocess.Popen(
            ["bash", "s/sweep.sbatch"], env=environment(**own), stdout=log, stderr=log
        )
    wait_until(lambda: trains_beyond("seed_1"))
    task.send_signal(signal.SIGUSR1)
    assert task.wait(DEADLINE) == 75
    assert "back into the queue\nscontrol requeue 7\n" in Path("task.log").read_text()
    assert (status("seed_1")["code"], status("seed_0")) == (75, {})
    assert [row["state"] for row in rows()] == ["pending", "interrupted"]
