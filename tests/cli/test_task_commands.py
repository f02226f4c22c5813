"""Every command for every task: a result, or one sentence of why it has none. What has none stands
in the table of docs/reference/commands.md."""

import csv
import json
import re
from functools import cache
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest

from tests.common.marks import cases
from tests.common.small_runs import metrics, vil
from tests.common.small_tasks import SMALL_TASKS, words_of
from vil.data.datasets.fake import Fake
from vil.tasks import TASKS

PAGE = Path(__file__).parents[2] / "docs/reference/commands.md"
FORMATS = list(dict.fromkeys(name for task in TASKS.values() for name in task.facts["formats"]))
FEW = ("OPTIM.EPOCHS=1", "SOLVER.WARMUP_EPOCHS=0", "DATALOADER.BSZ=8")
IMAGES = 16
FEW_IMAGES = (f"DATA.KWARGS.n={IMAGES}",)

# {row: (words, file that is written)}. RUN and OTHER are two runs of the task, the two folds of a
# cross-validation if it has splits; CONFIG is their config; PHOTO an image.
ROWS = {
    "train --resume": ("train CONFIG --output_dir RUN --resume", "RUN/status.json"),
    "train --dry-run": ("train CONFIG --dry-run", ""),
    "data check": ("data check CONFIG --json out.json", "out.json"),
    "evaluate": ("evaluate --run RUN --output_dir out", "out/eval/results.json"),
    "evaluate --calibrate": ("evaluate --run RUN --calibrate", "RUN/calibration.json"),
    "evaluate --pictures": ("evaluate --run RUN --pictures 1", "RUN/eval/pictures"),
    "predict": ("predict --run RUN PHOTO --output-file out.txt", "out.txt"),
    "predict --output": ("predict --run RUN PHOTO --output out", "out/photo.png"),
    "predict --threshold": ("predict --run RUN PHOTO --threshold 0.5 --top 1", ""),
    "predict --tta": ("predict --run RUN PHOTO --tta hflip", ""),
    "predict --fast": ("predict --run RUN PHOTO --fast", ""),
    "predict --stream": ("predict --run RUN PHOTO --stream --memory 1GiB", ""),
    "predict, several runs": ("predict --run RUN --run OTHER PHOTO", ""),
    "predict --out-of-fold": ("predict --run RUN --run OTHER --out-of-fold", ""),
    "embed": ("embed --run RUN PHOTO --output-file out.npy", "out.npy"),
    "embed --probe": ("embed --run RUN --probe", ""),
    "convert": ("convert RUN out.safetensors", "out.safetensors"),
    "visualize attention": ("visualize attention PHOTO --run RUN --out out.png", "out.png"),
    "visualize pattern": ("visualize pattern --grid 8 --window 4 --out out.png", "out.png"),
    "report": ("report RUN --out out.html", "out.html"),
    "analyze": ("analyze CONFIG", ""),
    "info": ("info CONFIG", ""),
    "config": ("config CONFIG", ""),
    "sweep --dry-run": ("sweep CONFIG SEED=[0,1] --output out --dry-run", ""),
    "predict --sample": ("predict --run RUN --sample", ""),
    "export --to onnx": ("export --run RUN --out out.onnx --check", "out.onnx"),
    "export --to onnx --int8": ("export --run RUN --out out.onnx --int8 --check", "out.int8.onnx"),
    "export --to torch": ("export --run RUN --out out.pt2 --dynamic batch", "out.pt2"),
    "export --to aoti": ("export --run RUN --out out.pt2 --to aoti --dynamic none", "out.pt2"),
    "tune": ("tune CONFIG --rounds 1 --backends masked,gathered", ""),
    "benchmark model": (
        "benchmark model CONFIG --ways fp32 --backends none --beside none --rounds 1 --out out",
        "out",
    ),
    "benchmark attention": (
        "benchmark attention --grids 8 --window 4 --backends masked --out out --device cpu",
        "out",
    ),
}


@cache
def refused() -> set[tuple[str, str]]:
    """(row, task) of the cells "no" of the table."""
    text = PAGE.read_text(encoding="utf-8").split("## Tasks")[1].split("\n## ")[0]
    title, _, *lines = (line.strip("| ").split(" | ") for line in re.findall(r"^\|.*", text, re.M))
    assert sorted(title[1:-1]) == sorted(SMALL_TASKS)
    return {
        (name.strip("`"), task)
        for name, *cells, why in lines
        for task, cell in zip(title[1:], cells)
        if cell == "no"
    }


@pytest.fixture(scope="session")
def train_runs(tmp_path_factory):
    """Train two runs of a task, once. Returns their folders."""

    @cache
    def train(task: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(task)
        folds = ["DATA.FOLDS=2"] if TASKS[task].load().has_splits else []
        for fold in range(2):
            own = [*folds, f"DATA.FOLD={fold}"] if folds else [f"SEED={fold}"]
            words = [*words_of(task, folder), *FEW, *FEW_IMAGES, *own]
            ended = vil("train", *words, "--output_dir", folder / f"fold{fold}")
            assert ended.code == 0, ended.err
        return folder / "fold0", folder / "fold1"

    return train


@pytest.fixture
def place(train_runs):
    """Replace the names in the words of a row."""
    Fake(None, "val", n=1, size=32).image(0).save("photo.png")

    def fill(words: str, task: str) -> list[str]:
        run, other = train_runs(task)
        folds = ["DATA.FOLDS=2"] if TASKS[task].load().has_splits else ["SEED=0"]
        config = [*words_of(task, run.parent), *FEW, *FEW_IMAGES, *folds]
        names = {"RUN": [run], "OTHER": [other], "PHOTO": ["photo.png"], "CONFIG": config}
        filled = [part for word in words.split() for part in names.get(word, [word])]
        return [str(word).replace("RUN", str(run)) for word in filled]

    return fill


def check(ended, is_refused: bool, file: str = "") -> None:
    assert "Traceback" not in ended.err
    if not is_refused:
        assert ended.code == 0, ended.err
        assert not file or Path(file).exists()
        return
    assert ended.code in (2, 3), ended
    reason = ended.err.splitlines()[-1]
    assert re.match(r"vil [a-z ]+: \S+ .* \S+", reason), reason
    assert not file or not Path(file).exists()


CELLS = [(row, task) for row in ROWS for task in SMALL_TASKS]
# Other results than those of classification, by the same code.
ALIKE = ("multilabel", "regression", "distillation", "simmim")
# tests/cli/test_export_command.py compiles a classifier, and tests/tasks/test_every_task.py exports
# models of labels and of numbers.
SLOW = [
    (row, task)
    for row, task in CELLS
    if (row, task) not in refused()
    and (
        (row == "export --to aoti" and task != "segmentation")
        or (row.startswith("export") and task in ("multilabel", "regression"))
    )
]
LONG = [
    (row, task)
    for row, task in CELLS
    if (row, task) not in SLOW
    and (
        re.match("export|tune|benchmark|predict --sample", row)
        or (task in ALIKE and (row, task) not in refused())
    )
]


@pytest.mark.parametrize("cell", cases(CELLS, LONG, text=" ".join, slow=SLOW), ids=" ".join)
def test_a_command_gives_a_result_or_a_reason(cell, place):
    row, task = cell
    words, file = ROWS[row]
    is_refused = cell in refused()
    check(vil(*place(words, task)), is_refused, *place(file, task))


def test_the_table_names_commands_of_this_test():
    assert {row for row, _ in refused()} <= ROWS.keys()


ROWS_WITH_FORMATS = [
    (row, task) for row in ("predict", "predict --out-of-fold") for task in SMALL_TASKS
]
LONG_FORMATS = [
    (row, task)
    for row, task in ROWS_WITH_FORMATS
    if row.endswith("fold") and task not in ("classification", "detection")
]


@pytest.mark.parametrize(
    "cell", cases(ROWS_WITH_FORMATS, LONG_FORMATS, text=" ".join), ids=" ".join
)
def test_every_format(cell, place):
    """Of the task; those of other tasks are refused with the choices."""
    row, task = cell
    words, *_ = ROWS[row]
    for name in FORMATS:
        is_refused = name not in TASKS[task].facts["formats"] or (row, task) in refused()
        ended = vil(*place(words, task), "--format", name)
        check(ended, is_refused)
        if name == "json" and not is_refused and row.endswith("fold"):
            records = json.loads(ended.out)
            assert len({record["file"] for record in records}) == len(records) == IMAGES
            names = {"hue 0", "hue 90", "hue 180", "hue 270"}
            one_hot = {" ".join(row) for row in np.eye(4, dtype=int).astype(str).tolist()}
            targets = {"classification": names, "multilabel": names, "regression": one_hot}
            assert {record.get("target") for record in records} == targets.get(task, {None})


@pytest.mark.parametrize("task", cases(SMALL_TASKS))
def test_other_checkpoints_do_not_replace_the_results_of_the_best(task, train_runs):
    run, other = train_runs(task)
    assert vil("evaluate", "--run", run).code == 0
    file = run / "eval/results.json"
    best, changed = file.read_text(), file.stat().st_mtime_ns
    words = ["evaluate", "--run", run, f"MODEL.MODEL_PATH={other}/checkpoints/last"]
    words += ["RUN.ALLOW_CHANGES=True"] * TASKS[task].load().has_splits  # trained on these images
    ended = vil(*words)
    assert ended.code == 0, ended.err
    assert (file.read_text(), file.stat().st_mtime_ns) == (best, changed)
    assert list((run / "eval").glob("*/results.json"))


@pytest.mark.long
@pytest.mark.parametrize("task", cases(["classification", "detection"]))
def test_a_sweep_has_the_mean_and_spread_over_folds_or_seeds(task, place):
    axis = "DATA.FOLD" if TASKS[task].load().has_splits else "SEED"
    ended = vil(*place("sweep CONFIG --output out", task), f"{axis}=[0, 1]")
    assert ended.code == 0, ended.err
    (row,) = csv.DictReader(Path("out/summary.csv").read_text().splitlines())
    values = [metrics(run, "val")[-1] for run in sorted(Path("out/runs").iterdir())]
    name = next(iter(TASKS[task].facts["metrics"]))
    name = name if name in row else "mask_ap"
    assert float(row[name]) == pytest.approx(mean(each[name] for each in values))
    assert float(row[f"{name}_std"]) == pytest.approx(stdev(each[name] for each in values))
    assert (row["finished"], row["runs"]) == ("2", "2")
    assert "±" in Path("out/summary.md").read_text(encoding="utf-8")
