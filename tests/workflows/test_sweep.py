"""Sweeps: the runs of a grid, what is refused, what a folder remembers, and the table. In real
processes: killed and started again they lose nothing, and signals stop them as `vil train`."""

import csv
import io
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

import vil as package
from tests.common.small_runs import (
    TINY,
    checkpoint,
    command,
    environment,
    figures,
    metrics,
    succeeds,
    vil,
)
from vil.config import get_config
from vil.report import run_record
from vil.report.sweep_table import RunRow, format_table, summarize, to_csv
from vil.utils.errors import ConfigError
from vil.workflows.sweep import sweep, write_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
COMPONENTS = Path(__file__).parents[1] / "plugins/my_components.py"
ATTN = "MODEL.VIT.MSVIT.ATTN_TYPE"
GRID = f"""
base: digits/vil_nano.yaml
fixed:
  OPTIM.EPOCHS: 3
  DATALOADER: {{BSZ: 16}}
variants:
  plain: {{}}
  bare:
  linformer: {{_BASE_: digits/vil_nano_linformer.yaml}}
  full:
    {ATTN}: full
    OPTIM: {{EPOCHS: 5}}
grid:
  SEED: [0, 1]
"""
DEADLINE = 300


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def plan(config=None, overrides=None, **settings):
    return sweep(config, overrides, output_dir="s", train=False, **settings).plan


def planned(*words, **settings):
    return plan(None, [*TINY, *words], **settings)


def remember(*words, **settings):
    runs = planned(*words, **settings)
    write_plan(runs)
    return runs


def names(runs):
    return [run.name for run in runs]


# ------------------------------------------------------------------------------------- the grid


def test_a_run_for_each_combination_the_last_key_fastest():
    runs = planned(f"{ATTN}=[full, longformer]", "SEED", "[0, 7]")
    assert names(runs) == [
        "attn_type_full-seed_0", "attn_type_full-seed_7",
        "attn_type_longformer-seed_0", "attn_type_longformer-seed_7",
    ]  # fmt: skip
    assert [run.cfg.SEED for run in runs] == [0, 7, 0, 7]
    assert [run.group for run in runs[1:3]] == ["attn_type_full", "attn_type_longformer"]


def test_folds_and_seeds_are_repetitions():
    runs = planned("DATA.FOLDS=2", "DATA.FOLD=[0, 1]", "SEED=[0, 7]", "OPTIM.LR=[0.1, 0.2]")
    assert names(runs)[0] == "fold_0-seed_0-lr_0.1"
    assert {run.group for run in runs} == {"lr_0.1", "lr_0.2"}
    write_plan(runs)
    result = sweep(output_dir="s", train=False)
    assert [row.runs for row in result.rows] == [4, 4]
    assert {(row.fold, row.seed) for row in result.runs} == {(0, 0), (0, 7), (1, 0), (1, 7)}
    assert {tuple(row.settings) for row in result.runs} == {("OPTIM.LR",)}


def test_a_list_is_one_value_of_a_key_that_takes_a_list():
    runs = planned("AUG.SCALE=[0.5, 1.0]", "SEED=[1]")
    assert [run.cfg.AUG.SCALE for run in runs] == [(0.5, 1.0)]
    runs = planned("AUG.SCALE=[[0.5, 1.0], [0.7, 1.0]]")
    assert [run.cfg.AUG.SCALE for run in runs] == [(0.5, 1.0), (0.7, 1.0)]
    assert names(runs) == ["scale_0.5_1.0", "scale_0.7_1.0"]
    runs = planned("DATA.KWARGS.label_columns=[a, b]", "SEED=[1]")
    assert [run.cfg.DATA.KWARGS.label_columns for run in runs] == [["a", "b"]]
    runs = planned("DATA.KWARGS.n=[32, 64]")
    assert [run.cfg.DATA.KWARGS.n for run in runs] == [32, 64]


def test_a_file_has_a_base_fixed_settings_variants_and_a_grid():
    Path("g.yaml").write_text(GRID)
    runs = plan(file="g.yaml")
    assert names(runs)[:3] == ["plain-seed_0", "plain-seed_1", "bare-seed_0"]
    first = {run.group: run.cfg for run in runs if run.cfg.SEED == 0}
    assert first["plain"].OPTIM.EPOCHS == 3
    assert first["plain"].DATALOADER.BSZ == 16
    assert first["full"].OPTIM.EPOCHS == 5  # a variant wins over fixed
    own = get_config("digits/vil_nano_linformer.yaml")
    assert first["linformer"].MODEL == own.MODEL
    assert first["linformer"].OPTIM.EPOCHS == 3  # fixed wins over a config file
    runs = plan(None, ["SEED=[5]", "OPTIM.LR=0.1"], file="g.yaml")
    assert {run.cfg.SEED for run in runs} == {5}
    assert {run.cfg.OPTIM.LR for run in runs} == {0.1}


def test_python_values_make_the_same_grid():
    words = planned(f"{ATTN}=[full, longformer]", "OPTIM.LR=[0.1, 0.2]")
    axes = {ATTN: ["full", "longformer"], "OPTIM.LR": [0.1, 0.2]}
    python = plan(None, TINY, grid=axes)
    assert names(words) == names(python)
    assert [run.cfg for run in words] == [run.cfg for run in python]
    variants = {"a": {"OPTIM.LR": 0.1, "AUG.SCALE": [0.5, 1]}, "b": {}}
    runs = plan(None, TINY, variants=variants)
    assert [run.cfg.OPTIM.LR for run in runs] == [0.1, 0.01]


def test_the_examples_are_grids():
    runs = plan(file=EXAMPLES / "sweep_attentions.yaml")
    assert len(runs) == 21
    write_plan(runs)
    assert len(plan(file=EXAMPLES / "sweep_patterns.yaml")) == 30


WRONG = [
    ("OPTIM.EPOCH=3 SEED=[0,1]", "OPTIM.EPOCH: unknown key; did you mean OPTIM.EPOCHS?"),
    (f"{ATTN}=[full,longfromer]", "did you mean longformer?"),
    ("SEED=[0,x]", "run seed_x: command line: SEED: expected int, got 'x'"),
    ("SEED=[1,1]", "run seed_1: given twice"),
    (
        " ".join(f"{key}=[{'1,' * 300}2]" for key in ("SEED", "LOG_FREQ", "OPTIM.EPOCHS")),
        "the grid has 27270901 runs, more than 10000",
    ),
    ("SEED=3", "s has no runs yet, and there is nothing to sweep over"),
    ("OUTPUT_DIR=[x,y]", "OUTPUT_DIR is not allowed, because --output sets the folders"),
    ("MODEL.VIT.MSVIT.ARCH=[l1,h5]", "run arch_h5: ARCH stage 1 ('h5'): the width"),
    ("MODEL.VIT.MSVIT.BACKEND=[auto,blokced]", "unknown backend 'blokced'"),
    ("SEED=[1] --table", "--table: s has no sweep yet; to start one, leave out this flag"),
    ('SEED=[1] --slurm=--comment="a', "--slurm '--comment=\"a': No closing quotation"),
    ("--grid none.yaml", "none.yaml: no such config file"),
    pytest.param(
        "TASK=[classification,detection]",
        "run task_detection: TASK detection needs a detector: set DETECTION.MODEL",
        marks=pytest.mark.detection,
    ),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=lambda value: value[:40])
def test_wrong_words_are_refused_in_one_line_before_any_work(words, message):
    ended = vil("sweep", "--output", "s", *TINY, *words.split())
    assert ended.code == 2, ended
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert not Path("s").exists()


FILES = [
    ("gird:\n  SEED: [1]", "g.yaml:2: gird.SEED: expected `base: FILE`, or config keys"),
    ("grid:\n  SEED: 1", "g.yaml:2: SEED: expected a list of values, got '1'"),
    ("grid: [1]", "g.yaml:1: grid: expected `base: FILE`, or config keys"),
    ("base: no.yaml\ngrid: {SEED: [1]}", "g.yaml:1: _BASE_ no.yaml: no such config file"),
    ("variants:\n  a: 3", "g.yaml:2: variants.a: expected `base: FILE`, or config keys"),
    ("variants:\n  a: {OPTIM.LRR: 3}", "run a: g.yaml:2: OPTIM.LRR: unknown key; did you mean"),
    ("variants:\n  a: {SEED: 3}\ngrid: {SEED: [1]}", "SEED is set by the variant, but is also"),
    ("variants:\n  a: !!python/name:os.system", "tags are not allowed"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=lambda value: value[:30])
def test_wrong_files_are_refused_with_their_line(text, message):
    Path("g.yaml").write_text(text)
    ended = vil("sweep", "--grid", "g.yaml")
    assert ended.code == 2, ended
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert list(Path().iterdir()) == [Path("g.yaml")]


@pytest.mark.detection
def test_runs_of_two_metrics_are_not_compared():
    variants = {"a": {}, "b": {"_BASE_": "scenes/retinanet_vil_nano.yaml"}}
    with pytest.raises(ConfigError, match="run b: has the metric box_ap, but .* run has top1"):
        plan("digits/vil_nano.yaml", variants=variants)


# -------------------------------------------------------------------------- what it remembers


def test_a_larger_grid_adds_runs_and_the_folder_alone_is_enough():
    first = remember("SEED=[0, 1]")
    second = remember("SEED=[0, 1, 2]")
    assert names(second) == ["seed_0", "seed_1", "seed_2"]
    known = plan()
    assert names(known) == names(second)
    assert [run.cfg for run in known[:2]] == [run.cfg for run in first]
    moved = plan(data="elsewhere")  # how, not what
    assert {run.cfg.DATA.PATH for run in moved} == {"elsewhere"}


def test_a_contradicting_base_is_refused_with_its_key():
    remember("SEED=[0, 1]")
    for words in (["SEED=[2]", "OPTIM.EPOCHS=5"], ["SEED=[0]", "OPTIM.EPOCHS=5"]):
        with pytest.raises(ConfigError, match="OPTIM.EPOCHS is 2 in the sweep in s, and cannot"):
            planned(*words)
    with pytest.raises(ConfigError, match="OPTIM.EPOCHS is 2 in the sweep in s, and cannot"):
        planned("OPTIM.LR=[0.5]", "OPTIM.EPOCHS=5")  # of another group
    remember(variants={"a": {}})
    with pytest.raises(ConfigError, match="SEED is 0 in the sweep in s"):
        planned("SEED=1", variants={"a": {}})
    remember("SEED=[0]", "DATALOADER.WORKERS=1")
    assert get_config("s/configs/seed_0.yaml").DATALOADER.WORKERS == 1


@pytest.mark.parametrize("text", ["", '{"runs": [{"nam": "a"}]}'])
def test_a_damaged_folder_is_refused(text):
    remember("SEED=[0]")
    Path("s/sweep.json").write_text(text)
    with pytest.raises(ConfigError, match="sweep.json cannot be read"):
        plan()


def test_the_folder_of_a_run_is_refused():
    Path("s").mkdir()
    Path("s/config.yaml").touch()
    with pytest.raises(ConfigError, match="s is the folder of a run"):
        planned("SEED=[0]")


def test_a_dry_run_lists_the_states_and_writes_nothing():
    words = ("--output", "s", *TINY, "SEED=[0, 1, 2, 3, 4, 5]")
    shown = succeeds("sweep", *words, "--dry-run")
    assert shown.startswith("6 runs in s; every config is valid\nseed_0  pending\n")
    assert not Path("s").exists()
    _, killed, saved, failed, done, crashed = remember("SEED=[0, 1, 2, 3, 4, 5]")
    records = [
        (killed, {"state": "running", "code": None}),
        (saved, {"state": "preempted", "code": 75, "reason": "stopped by SIGTERM"}),
        (failed, {"state": "failed", "code": 5, "reason": "DivergedError: nan"}),
        (done, {"state": "finished", "code": 0}),
    ]
    for run, record in records:
        run.folder.mkdir()
        (run.folder / "status.json").write_text(json.dumps(record))
    crashed.path("output", ".txt").write_text("# vil train\nvil train: no data\nsome more\n")
    rows = [(row.state, row.reason) for row in sweep(output_dir="s", train=False).runs]
    assert rows == [
        ("pending", ""), ("interrupted", ""), ("interrupted", "stopped by SIGTERM"),
        ("failed", "DivergedError: nan"), ("finished", ""), ("failed", "no data"),
    ]  # fmt: skip
    shown = succeeds("sweep", *words[:2], "--table")
    assert re.search(r"\| seed_3 +\| failed +\| 0 +\| DivergedError: nan +\|\n", shown)


# ------------------------------------------------------------------------------------ the table


def row(name, seed, metric, state="finished", **more):
    return RunRow(f"{name}-{seed}", name, {ATTN: name}, seed, state, metric=metric, **more)


def test_the_table_has_the_mean_and_spread_of_the_finished_runs():
    full = [row("full", 0, 90.0, test=80.0, images_per_second=100.0)]
    full += [row("full", 1, 94.0, test=84.0, memory_mib=8.0)]
    full += [row("full", 2, None, "failed", reason="a|b\n<c>")]
    one = [row("one", 0, 50.0, images_per_second=10.0, memory_mib=4.0)]
    none = [row("none", 0, None, "pending")]
    groups = [summarize(runs, 1000, 10**7) for runs in (full, one, none)]
    text = re.sub(" +", " ", format_table(groups, [*full, *one, *none], "top-1", "%"))
    assert "| | top-1 (%) | test | runs |" in text
    assert "| full | 92.00 ± 2.83 | 82.00 ± 2.83 | 2 of 3 | 100.0 | 8 | 1 k | 10 M |" in text
    assert "| one | 50.00 | - | 1 | 10.0 | 4 |" in text
    assert "| full-2 | failed | 0 | a\\|b <c> |" in text

    rows = list(csv.DictReader(io.StringIO(to_csv(groups, "top1"))))
    assert [r["top1"] for r in rows] == ["92.0", "50.0", ""]
    assert [r["test_top1"] for r in rows] == ["82.0", "", ""]
    assert float(rows[0]["top1_std"]) == pytest.approx(8**0.5)
    assert [r[ATTN] for r in rows] == ["full", "one", "none"]
    rows = list(csv.DictReader(io.StringIO(to_csv([*full, *one], "top1"))))
    assert [r["seed"] for r in rows] == ["0", "1", "2", "0"]
    assert [r["test_top1"] for r in rows] == ["80.0", "84.0", "", ""]
    assert rows[2]["reason"] == "a|b\n<c>"


def test_the_last_evaluation_counts_even_if_it_is_nan():
    runs = remember("SEED=[0, 1]")
    for run, last in zip(runs, (None, 60.0)):  # the log has null for NaN
        run.folder.mkdir()
        (run.folder / "status.json").write_text('{"state": "finished", "code": 0}')
        logged = [("val/a", 70.0), ("val/a", last), ("test/a", 50.0), ("test/b", 10.0)]
        points = [
            {"split": split, "step": step, "epoch": step, "top1": value}
            for step, (split, value) in enumerate(logged)
        ]
        (run.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, points)))
    result = sweep(output_dir="s", train=False)
    found = [(row.metric, row.best, row.test) for row in result.runs]
    assert found == [(None, 70.0, 50.0), (60.0, 70.0, 50.0)]  # test: on the first set
    (group,) = result.rows
    assert (group.metric, group.tests, group.finished, group.runs) == (60.0, [50.0], 1, 2)


# ---------------------------------------------------------------------------- in real processes

# two variants with two seeds
SWEEP = ("sweep", "--output", "s", *TINY, f"{ATTN}=[full, longformer]", "SEED=[0, 1]")
NAMES = [f"attn_type_{name}-seed_{seed}" for name in ("full", "longformer") for seed in (0, 1)]


def begin(*words, **environ):
    """A sweep in a process group of its own."""
    with Path("sweep.log").open("a") as stream:
        streams = dict(stdout=stream, stderr=stream, start_new_session=True)
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


def status(name) -> dict:
    file = Path("s/runs", name, "status.json")
    return json.loads(file.read_text()) if file.exists() else {}


def trains_beyond(name, step=0) -> bool:
    """Whether a run has logged a later step."""
    points = run_record.metrics(Path("s/runs", name, "metrics.jsonl"))  # may be half a line
    return any(point["split"] == "train" and point["step"] > step for point in points)


def starts(name) -> int:
    """How often a run has started to train."""
    file = Path("s/runs", name, "command.txt")
    return len(re.findall(r"^# ", file.read_text(), re.MULTILINE)) if file.exists() else 0


def table(file="s/runs.csv") -> list[dict]:
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


# Kills the sweep and its run at the tenth step of the second run.
KILLER = f"""
import os, signal, sys
from pathlib import Path
from vil.engine import loop

def seed_step(seed, step, rank, plain=loop.seed_step):
    if step == 9 and {NAMES[1]!r} in " ".join(sys.argv) and not Path("killed").exists():
        Path("killed").touch()
        os.killpg(0, signal.SIGKILL)
    plain(seed, step, rank)

loop.seed_step = seed_step
"""


@pytest.mark.long
def test_killed_midway_and_started_again_it_loses_and_repeats_nothing(tmp_path):
    Path("killer.py").write_text(KILLER)
    words, second = (*SWEEP, "OPTIM.EPOCHS=6", "--import", tmp_path / "killer.py"), NAMES[1]
    begin(*words).wait()
    assert [status(name).get("state") for name in NAMES] == ["finished", "running", None, None]
    before = Path("s/runs", NAMES[0], "metrics.jsonl").stat()

    assert "1 of 4 runs have finished" in run(*words)
    assert [starts(name) for name in NAMES] == [1, 2, 1, 1]
    assert "resuming from" in Path("s/output", f"{second}.txt").read_text()
    after = Path("s/runs", NAMES[0], "metrics.jsonl").stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    run("train", "--config-file", f"s/configs/{second}.yaml", "--output_dir", "whole")
    assert figures(metrics(f"s/runs/{second}")) == figures(metrics("whole"))
    ours, whole = (
        load_file(checkpoint(folder) / "model.safetensors")
        for folder in (f"s/runs/{second}", "whole")
    )
    assert all(torch.equal(ours[key], whole[key]) for key in whole)
    assert [(row["name"], row["state"]) for row in table()] == [(n, "finished") for n in NAMES]

    more = run(*words, f"{ATTN}=[full]", "SEED=[2]")
    assert "[5/5] attn_type_full-seed_2 finished: top1 " in more
    assert [starts(name) for name in NAMES] == [1, 2, 1, 1]
    summary = [(row["name"], row["finished"]) for row in table("s/summary.csv")]
    assert summary == [("attn_type_full", "3"), ("attn_type_longformer", "2")]


@pytest.mark.long
def test_a_run_whose_sweep_was_killed_saves_and_ends():
    """SIGKILL to the sweep alone. The next one waits for the run, and resumes it."""
    words = (*SWEEP[:-2], f"{ATTN}=[full]", "SEED=[0]", "OPTIM.EPOCHS=400", "RUN.SAVE_EVERY=400")
    name, sweep = NAMES[0], begin(*words)
    wait_until(lambda: trains_beyond(name))
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    sweep = begin(*words)
    wait_until(lambda: starts(name) == 2)
    resumed = re.search(rf"{name} resumes after step (\d+)", Path("sweep.log").read_text())
    wait_until(lambda: trains_beyond(name, int(resumed[1])))
    os.kill(sweep.pid, signal.SIGINT)
    assert sweep.wait(DEADLINE) == 130
    assert 0 < int(resumed[1]) < status(name)["step"]


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_the_runs_with_their_state_saved(number, code):
    words = (*SWEEP, "OPTIM.EPOCHS=400", "RUN.SAVE_EVERY=400", "--jobs", "2")
    sweep = begin(*words, OMP_NUM_THREADS="2")
    wait_until(lambda: all(map(trains_beyond, NAMES[:2])))
    os.kill(sweep.pid, number)
    assert sweep.wait(DEADLINE) == code
    for name in NAMES[:2]:
        assert status(name)["code"] == code
        assert status(name)["step"] > 0
        assert checkpoint(Path("s/runs", name))
        assert "threads 1," in Path("s/runs", name, "env.txt").read_text()
    assert [r["state"] for r in table()] == ["interrupted"] * 2 + ["pending"] * 2


@pytest.mark.long
def test_a_failed_run_is_recorded_and_tried_again():
    """Its data are missing."""
    variants = "{broken: {DATA.TRAIN: [folder]}, sound: {}}"
    Path("g.yaml").write_text(f"variants: {variants}\ngrid: {{SEED: [0]}}\n")
    words = ("sweep", "--grid", "g.yaml", "--output", "s", *TINY, "--data", "photos")
    shown = run(*words, code=3)
    assert "[1/2] broken-seed_0 failed: " in shown
    assert "[2/2] sound-seed_0 finished: top1 " in shown
    broken, sound = table()
    assert (broken["state"], sound["state"]) == ("failed", "finished")
    assert "photos" in broken["reason"]
    assert "broken-seed_0" in Path("s/summary.md").read_text()
    shown = run(*words, code=3)
    assert "broken-seed_0 failed" in shown
    assert "sound-seed_0 " not in shown
    assert starts("sound-seed_0") == 1
    assert len(re.findall(r"^# ", Path("s/output/broken-seed_0.txt").read_text(), re.M)) == 2


@pytest.mark.long
def test_from_python_with_an_attention_from_a_file():
    lines = []
    result = package.sweep(
        None, TINY, output_dir="s", grid={"OPTIM.EPOCHS": [1]}, imports=[str(COMPONENTS)],
        variants={"halved": {ATTN: "halved"}, "full": {ATTN: "full"}}, say=lines.append,
        num_processes=2,
    )  # fmt: skip
    assert (result.status, result.code) == ("finished", 0)
    assert [row.name for row in result.rows] == ["halved-epochs_1", "full-epochs_1"]
    for row in result.runs:
        assert row.metric == metrics(result.folder / "runs" / row.name, "val")[-1]["top1"]
        assert row.images_per_second > 0
        assert row.memory_mib > 100
        assert "ranks 2," in (result.folder / "runs" / row.name / "env.txt").read_text()
    assert result.rows[0].parameters > 0
    assert len(lines) == 4
    assert package.sweep(output_dir="s").status == "finished"


# ---------------------------------------------------------------------------------------- SLURM


def test_the_script_of_a_job_array():
    options = "--gres=gpu:1 --time 4:00:00"
    words = (*TINY, "SEED=[0,1,2]", "--slurm", options, "--jobs", "2", "--dry-run")
    shown = succeeds("sweep", "--output", "a b", *words)
    assert "#SBATCH --array=0-2%2\n" in shown
    assert f"#SBATCH {options}\n" in shown
    script = shown[shown.index("#!/") :]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert not Path("a b").exists()


@pytest.mark.long
def test_a_task_of_an_array_saves_and_is_requeued(tmp_path):
    """The script in a shell, with the variables of SLURM and a scontrol that prints its words."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text("#!/bin/sh\necho scontrol $*\n")
    (tmp_path / "bin/scontrol").chmod(0o755)
    own = dict(
        SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="7", PATH=f"{tmp_path}/bin:/usr/bin:/bin"
    )
    words = (*SWEEP[:-2], "SEED=[0, 1]", "RUN.SAVE_EVERY=400", "--nproc", 2)
    shown = run(*words, "OPTIM.EPOCHS=400", "--slurm", PATH="/nowhere")
    assert "on the cluster: sbatch s/sweep.sbatch" in shown
    with open("sweep.log", "w") as stream:
        task = subprocess.Popen(
            ["bash", "s/sweep.sbatch"], env=environment(**own), stdout=stream, stderr=stream
        )
    wait_until(lambda: trains_beyond("seed_1"))
    task.send_signal(signal.SIGUSR1)
    task.wait(DEADLINE)
    assert "back into the queue\nscontrol requeue 7_1\n" in Path("sweep.log").read_text()
    assert (status("seed_1")["code"], status("seed_0")) == (75, {})
    run("sweep", "--output", "s", "--table")
    assert [row["state"] for row in table()] == ["pending", "interrupted"]
