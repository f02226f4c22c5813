"""What a sweep would run, what it refuses, and what it remembers. Nothing is trained here;
test_sweep_runs.py does that."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.small_runs import TINY, succeeds, vil
from vil.config import get_config
from vil.config.defaults import KEYS
from vil.report import run_record
from vil.utils.errors import ConfigError
from vil.workflows.sweep import check_models
from vil.workflows.sweeping.plan import identify, plan_sweep, write_plan
from vil.workflows.sweeping.results import make_table
from vil.workflows.sweeping.slurm import ranges
from vil.workflows.sweeping.source import make_grid
from vil.workflows.sweeping.state import begin_attempt, end_attempt, read_state

EXAMPLES = Path(__file__).parents[2] / "examples"
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


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def planned(*words, folder="s", **settings):
    return plan_sweep(make_grid(None, [*TINY, *words], **settings), folder)


def names(plan):
    return [run.name for run in plan.runs]


# ----------------------------------------------------------------------------------- the grid


def test_a_run_for_each_combination_the_last_key_fastest():
    plan = planned(f"{ATTN}=[full, longformer]", "SEED", "[0, 7]")
    assert names(plan) == [
        "attn_type_full-seed_0", "attn_type_full-seed_7",
        "attn_type_longformer-seed_0", "attn_type_longformer-seed_7",
    ]  # fmt: skip
    assert [run.cfg.SEED for run in plan.runs] == [0, 7, 0, 7]
    assert list(plan.groups) == ["attn_type_full", "attn_type_longformer"]


def test_a_list_is_one_value_of_a_key_that_takes_a_list():
    plan = planned("AUG.SCALE=[0.5, 1.0]", "SEED=[1]")
    assert [run.cfg.AUG.SCALE for run in plan.runs] == [(0.5, 1.0)]
    plan = planned("AUG.SCALE=[[0.5, 1.0], [0.7, 1.0]]")
    assert [run.cfg.AUG.SCALE for run in plan.runs] == [(0.5, 1.0), (0.7, 1.0)]
    assert names(plan) == ["scale_0.5_1.0", "scale_0.7_1.0"]
    plan = planned("DATA.KWARGS.label_columns=[a, b]", "SEED=[1]")
    assert [run.cfg.DATA.KWARGS.label_columns for run in plan.runs] == [["a", "b"]]
    plan = planned("DATA.KWARGS.n=[32, 64]")
    assert [run.cfg.DATA.KWARGS.n for run in plan.runs] == [32, 64]


def test_names_are_those_of_folders_and_differ():
    values = ["a/b", "a|b", "x" * 90, "x" * 91]
    plan = planned(axes={"DATA.PATH": ["d"], "MODEL.MODEL_PATH": values})
    assert len(set(names(plan))) == 4
    assert all(re.fullmatch(r"[\w.+-]{1,80}", name) for name in names(plan))
    plan = planned("MODEL.VIT.DROP=[0.0]", "OPTIM.ADAM.BETA1=[0.8]", "OPTIM.LR=[1e-3, 0.01]")
    assert names(plan) == ["drop_0.0-beta1_0.8-lr_1e-3", "drop_0.0-beta1_0.8-lr_0.01"]


def test_a_file_has_a_base_fixed_settings_variants_and_a_grid():
    Path("g.yaml").write_text(GRID)
    plan = plan_sweep(make_grid(file="g.yaml"), "s")
    assert names(plan)[:2] == ["plain-seed_0", "plain-seed_1"]
    first = {run.variant: run.cfg for run in plan.runs if run.cfg.SEED == 0}
    assert first["plain"].OPTIM.EPOCHS == 3
    assert first["plain"].DATALOADER.BSZ == 16
    assert first["full"].OPTIM.EPOCHS == 5  # a variant wins over fixed
    own = get_config("digits/vil_nano_linformer.yaml")
    assert first["linformer"].MODEL == own.MODEL
    assert first["linformer"].OPTIM.EPOCHS == 3  # fixed wins over a config file
    plan = plan_sweep(make_grid(None, ["SEED=[5]", "OPTIM.LR=0.1"], file="g.yaml"), "s")
    assert {run.cfg.SEED for run in plan.runs} == {5}
    assert {run.cfg.OPTIM.LR for run in plan.runs} == {0.1}


def test_a_config_that_two_variants_share_runs_once(caplog):
    Path("g.yaml").write_text(GRID)
    plan = plan_sweep(make_grid(file="g.yaml"), "s")
    assert not [name for name in names(plan) if name.startswith("bare")]
    assert "plain-seed_0 and bare-seed_0 have the same config" in caplog.text


def test_a_warning_about_all_configs_is_given_once(caplog):
    planned("SEED=[0, 1, 2]", "OPTIM.WARMUP=7")
    assert caplog.text.count("OPTIM.WARMUP") == 1


def test_python_values_make_the_same_grid():
    words = planned(f"{ATTN}=[full, longformer]", "OPTIM.LR=[0.1, 0.2]")
    python = plan_sweep(
        make_grid(None, TINY, axes={ATTN: ["full", "longformer"], "OPTIM.LR": [0.1, 0.2]}), "s"
    )
    assert names(words) == names(python)
    assert [run.cfg for run in words.runs] == [run.cfg for run in python.runs]
    variants = {"a": {"OPTIM.LR": 0.1, "AUG.SCALE": [0.5, 1]}, "b": {}}
    plan = plan_sweep(make_grid(None, TINY, variants=variants), "s")
    assert [run.cfg.OPTIM.LR for run in plan.runs] == [0.1, 0.01]


# --------------------------------------------------------------------------------- bad input

WRONG = [
    ("OPTIM.EPOCH=3 SEED=[0,1]", "OPTIM.EPOCH: unknown key; did you mean OPTIM.EPOCHS?"),
    ("OPTIM.EPOCH=[3,4]", "OPTIM.EPOCH: unknown key; did you mean OPTIM.EPOCHS?"),
    (f"{ATTN}=[full,longfromer]", "did you mean longformer?"),
    ("SEED=[0,x]", "run seed_x: command line: SEED: expected int, got 'x'"),
    ("SEED=[0,-1]", "SEED: expected between 0 and"),
    ("SEED=[]", "SEED: expected a list of values, got []"),
    ("SEED=[1,1]", "SEED: '1' is given twice"),
    ("SEED=3", "has no sweep yet, and there is nothing to sweep over"),
    ("OUTPUT_DIR=x SEED=[1]", "OUTPUT_DIR is not allowed, because --output sets the"),
    ("OUTPUT_DIR=[x,y]", "OUTPUT_DIR is not allowed, because --output sets the"),
    ("MODEL.VIT.MSVIT.ARCH=[l1,h5]", "run arch_h5: ARCH stage 1 ('h5'): the width"),
    ("MODEL.VIT.MSVIT.BACKEND=[auto,blokced]", "unknown backend 'blokced'"),
    pytest.param(
        "TASK=[classification,detection]",
        "run task_detection: TASK detection needs a detector: set DETECTION.MODEL",
        marks=pytest.mark.detection,
    ),
    ("SEED=[1] --task 1", "--task 1: s has runs 0 to 0"),
    ("SEED=[1] --task 0", "--task 0: s has no sweep yet; to start one, leave out this flag"),
    ("SEED=[1] --table", "--table: s has no sweep yet; to start one, leave out this flag"),
    ('SEED=[1] --slurm=--comment="a', "--slurm '--comment=\"a': No closing quotation"),
    ("SEED=[1] --slurm gres", "--slurm 'gres': expected options of sbatch, got 'gres'"),
    ("SEED=[1] --list --table", "not allowed with"),
    ("SEED=[1] --jobs 0", "expected an integer of at least 1, got '0'"),
    ("--grid none.yaml", "none.yaml: no such config file"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=lambda value: value[:40])
def test_wrong_words_are_refused_in_one_line_before_any_work(words, message):
    ended = vil("sweep", "--output", "s", *TINY, *words.split())
    assert ended.code == 2, ended
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert not Path("s").exists()


FILES = [
    ("gird:\n  SEED: [1]", "g.yaml:2: unknown part of a sweep 'gird'; did you mean 'grid'?"),
    ("grid:\n  SEED: 1", "g.yaml:2: SEED: expected a list of values, got '1'"),
    ("grid: [1]", "g.yaml:1: grid: expected a mapping of keys to values"),
    ("base: no.yaml\ngrid: {SEED: [1]}", "g.yaml:1: _BASE_ no.yaml: no such config file"),
    ("base: /etc/hosts.yaml\ngrid: {SEED: [1]}", "/etc/hosts.yaml: no such config file"),
    ("variants:\n  a: 3", "g.yaml:2: variant a: expected a mapping of config keys to values, got"),
    ("variants:\n  a: {OPTIM.LRR: 3}", "run a: g.yaml:2: OPTIM.LRR: unknown key; did you mean"),
    ("variants:\n  ../a: {OPTIM.LR: 3}", "expected a name of letters, digits"),
    (
        "variants:\n  a: {SEED: 3}\ngrid: {SEED: [1]}",
        "SEED is set by the variant a, but is also an axis",
    ),
    (
        "fixed: {SEED: 1}\nvariants:\n  a: {SEED: 3}",
        "SEED has no effect, because every variant sets it",
    ),
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
    plan = plan_sweep(make_grid("digits/vil_nano.yaml", variants=variants), "s")
    with pytest.raises(ConfigError, match="run b has the metric box_ap, but run a has top1"):
        check_models(plan)


# -------------------------------------------------------------------------- what it remembers


def remember(*words, **settings):
    plan = planned(*words, **settings)
    write_plan(plan)
    return plan


def test_a_larger_grid_adds_runs_and_the_folder_alone_is_enough():
    first = remember("SEED=[0, 1]")
    second = remember("SEED=[0, 1, 2]")
    assert names(second) == ["seed_0", "seed_1", "seed_2"]
    assert names(plan_sweep(make_grid(), "s")) == names(second)
    known = plan_sweep(make_grid(), "s").runs[:2]
    assert [identify(run) for run in known] == [identify(run) for run in first.runs]
    third = plan_sweep(make_grid(None, ["SEED=[3]"]), "s")  # on the base of the folder
    assert names(third) == [*names(second), "seed_3"]
    assert third.runs[3].cfg.OPTIM == first.runs[0].cfg.OPTIM


def test_another_name_of_the_same_config_is_the_same_run():
    remember("SEED=[0, 1]")
    plan = remember("OPTIM.LR=[0.01, 0.02]", "SEED=[0, 1]")
    assert names(plan) == ["seed_0", "seed_1", "lr_0.02-seed_0", "lr_0.02-seed_1"]
    assert list(map(len, plan.groups.values())) == [2, 2]


def test_a_path_may_be_swept_over(caplog):
    def paths(plan):
        return {run.name: run.cfg.DATA.PATH for run in plan.runs}

    assert paths(remember("DATA.PATH=[a, b]")) == {"path_a": "a", "path_b": "b"}
    more = {f"path_{name}": name for name in "abc"}
    assert paths(remember("DATA.PATH=[c]")) == more
    assert not caplog.text
    plan = remember("DATA.PATH=[a, b]", "SEED=[0]", flags={"DATA.PATH": "d"})
    assert paths(plan) == more | {"seed_0": "d"}
    assert paths(planned(folder="t", variants={n: {"DATA.PATH": n} for n in "ab"})) == {"a": "a"}
    assert "a and b have the same config: only one of them is trained" in caplog.text


def test_a_contradicting_base_is_refused_with_its_key():
    remember("SEED=[0, 1]")
    with pytest.raises(ConfigError, match="OPTIM.EPOCHS is 2 in the sweep in s, and cannot"):
        planned("SEED=[0, 1, 2]", "OPTIM.EPOCHS=5")
    remember("SEED=[0]", "DATALOADER.WORKERS=1", "RUN.KEEP=1")  # how, not what
    assert get_config("s/configs/seed_0.yaml").DATALOADER.WORKERS == 1
    assert get_config("s/configs/seed_1.yaml").RUN.KEEP == 1


def test_a_base_may_need_the_values_of_the_axes():
    axis = "SOLVER.WARMUP_EPOCHS=[0, 0.5]"
    for words in (("SEED=[0]",), ("SEED=[0, 1]",)):
        plan = remember(axis, *words, "OPTIM.EPOCHS=1", "SOLVER.LR_POLICY=cosine")
    assert [run.cfg.SOLVER.WARMUP_EPOCHS for run in plan.runs] == [0, 0.5, 0, 0.5]
    with pytest.raises(ConfigError, match="the warm-up is longer than the run"):
        planned("SOLVER.WARMUP_EPOCHS=[3, 0.5]", "OPTIM.EPOCHS=1", "SOLVER.LR_POLICY=cosine")


def test_a_variant_that_changed_is_refused_with_its_key():
    remember(variants={"a": {"OPTIM.WD": 0.1}})
    with pytest.raises(ConfigError, match="a with OPTIM.WD 0.1, .* has OPTIM.WD 0.2: choose"):
        planned(variants={"a": {"OPTIM.WD": 0.2}})


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"runs": 3}', '{"runs": [{"name": "a"}]}', '{"runs": [{"name": '
             '"../../a", "group": "a", "variant": "", "settings": {}}]}']
)  # fmt: skip
def test_a_damaged_folder_is_refused(text):
    remember("SEED=[0]")
    Path("s/sweep.json").write_text(text)
    with pytest.raises(ConfigError, match="sweep.json (cannot be read|is not valid)"):
        plan_sweep(make_grid(), "s")


def test_the_folder_of_a_run_is_refused():
    Path("s").mkdir()
    Path("s/config.yaml").touch()
    with pytest.raises(ConfigError, match="s is the folder of a run"):
        planned("SEED=[0]")


# ---------------------------------------------------------------------------- states and lists


def leave(run, state="", **status):
    """Leave what a run of this state would."""
    run.folder.mkdir(parents=True, exist_ok=True)
    if state:
        record = {"state": state, "code": None, "step": 4, "checkpoint": None, "reason": ""}
        (run.folder / "status.json").write_text(json.dumps(record | status))


def test_states():
    plan = remember("SEED=[0,1,2,3,4,5,6,7]")
    new, killed, saved, failed, done, crashed, late, held = plan.runs
    leave(killed, "running")
    leave(saved, "preempted", code=75, reason="stopped by SIGTERM")
    leave(failed, "failed", code=5, reason="DivergedError: nan")
    leave(done, "finished", code=0)
    crashed.output_file.write_text("vil train: no data\nsome more\n")
    end_attempt(crashed, 3, begin_attempt(crashed))
    leave(late, "running")  # killed after its last checkpoint; then there was nothing to do
    end_attempt(late, 0, begin_attempt(late))
    leave(held, "running")
    lock = f"import fcntl; f = open({str(held.folder / 'run.lock')!r}, 'a+'); fcntl.lockf(f, 2)"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{lock}; print('held', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    holder.stdout.readline()
    states = {run.name: read_state(run) for run in plan.runs}
    shown = succeeds("sweep", "--output", "s", "--list")
    holder.communicate(b"\n")
    assert [state.state for state in states.values()] == [
        "pending", "interrupted", "interrupted", "failed", "finished", "failed", "finished",
        "running",
    ]  # fmt: skip
    assert states[crashed.name].reason == "no data"
    assert re.search(r"seed_3 +failed +step 4 +DivergedError: nan\n", shown)
    assert shown.endswith("1 pending, 2 interrupted, 2 failed, 2 finished, 1 running\n")
    assert read_state(held).state == "interrupted"


@pytest.mark.parametrize("name", ["metrics"])
def test_a_run_that_cannot_be_read_is_a_row_with_the_reason(name, monkeypatch):
    plan = remember("SEED=[0,1]")
    leave(plan.runs[0], "finished", code=0)

    def refuse(file):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(run_record, name, refuse)
    first = make_table(plan, {}).runs[0]
    assert (first.state, first.reason) == ("failed", "s/runs/seed_0: Permission denied")


def test_a_killed_run_says_so():
    (run,) = remember("SEED=[0]").runs
    end_attempt(run, -9, begin_attempt(run))
    assert read_state(run)[:3] == ("failed", 1, "killed by signal 9, Killed (out of memory?)")


def test_a_finished_run_whose_folder_was_deleted_is_pending():
    (run,) = remember("SEED=[0]").runs
    run.folder.mkdir(parents=True)
    end_attempt(run, 0, begin_attempt(run))
    assert read_state(run).state == "finished"
    run.folder.rmdir()
    assert read_state(run).state == "pending"


def test_a_dry_run_lists_and_writes_nothing():
    shown = succeeds("sweep", "--output", "s", *TINY, "SEED=[0, 1]", "--dry-run")
    assert shown.startswith("2 runs in s; every config is valid\n")
    assert re.search(r"^seed_1 +pending +SEED=1$", shown, re.MULTILINE)
    assert not Path("s").exists()


def test_the_examples_are_grids():
    plan = plan_sweep(make_grid(file=EXAMPLES / "sweep_attentions.yaml"), "s")
    assert len(plan.runs) == 21
    if "MODEL.VIT.MSVIT.PATTERN" in KEYS:
        write_plan(plan)
        more = plan_sweep(make_grid(file=EXAMPLES / "sweep_patterns.yaml"), "s")
        assert len(more.runs) == 30


@pytest.mark.long
def test_the_models_of_the_examples_build():
    sizes = check_models(plan_sweep(make_grid(file=EXAMPLES / "sweep_attentions.yaml"), "s"))
    assert all(size.parameters < 450_000 and size.macs > 1e7 for size in sizes.values())


# ---------------------------------------------------------------------------------------- SLURM


def test_the_script_of_a_job_array():
    options = "--gres=gpu:1 --time 4:00:00"
    words = (*TINY, "SEED=[0,1,2]", "--slurm", options, "--jobs", "2", "--dry-run")
    shown = succeeds("sweep", "--output", "a b", *words)
    assert "#SBATCH --array=0-2%2\n" in shown
    assert "#SBATCH --gres=gpu:1\n#SBATCH --time 4:00:00\n" in shown
    script = shown[shown.index("#!/") :]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert ranges([0, 1, 2, 5]) == "0-2,5"
    assert ranges([3]) == "3"
    assert not Path("a b").exists()
