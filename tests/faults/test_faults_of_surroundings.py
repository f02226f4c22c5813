"""Python's options, the locale and the time zone change neither the weights nor the checks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.faults.real_runs import begin, end_all, said, seconds_to_end
from tests.common.faults.records import record
from tests.common.faults.same_runs import EVERYTHING, equal_digests
from tests.common.small_runs import (
    FOLDER,
    TINY,
    command,
    draw_pictures,
    environment,
    figures,
    metrics,
    vil,
)

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SETTINGS = {
    "PYTHONHASHSEED=0": {"PYTHONHASHSEED": "0"},
    "PYTHONHASHSEED=1, TZ=Asia/Kathmandu": {"PYTHONHASHSEED": "1", "TZ": "Asia/Kathmandu"},
    "python -O": {"PYTHONOPTIMIZE": "1"},
    "python -W error": {"PYTHONWARNINGS": "error"},  # of all packages, none left out
    "LC_ALL=C": ASCII,
}
DIGESTS = 4
MSVIT = "MODEL.VIT.MSVIT"
# Refused before torch is imported, and after.
WRONG = [
    ["OPTIM.LRR=1"], ["OPTIM.LR=-1"], ["DATALOADER.BSZ=x"],
    [f"{MSVIT}.SW_EXACT=1", f"{MSVIT}.MODE=1"],
    ["SOLVER.LR_POLICY=cosine", "SOLVER.WARMUP_EPOCHS=9"],
]  # fmt: skip
WRONG_LATER = [
    [f"{MSVIT}.ARCH=l1,h3,d16,n1,s1,g1,p4,f3,a0"], [f"{MSVIT}.BACKEND=none"], ["MODEL.ARCH=none"],
    ["DATALOADER.BSZ=200"], ["DATA.NUM_CLASSES=3"], ["DATA.TRAIN=[none]"], ["DATA.KWARGS.none=1"],
    ["DATA.TRAIN=[folder]"], ["MODEL.MODEL_PATH=none"], ["FINETUNE.FREEZE_STAGES=9"],
    ["DATA.TARGETMAP=none.json"],
]  # fmt: skip
ALL_IN_ONE = """
import json, sys
from tests.common.small_runs import vil
print(json.dumps([vil(*line) for line in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{setting: folder} of the same run, on images whose class names are not ASCII."""
    root = tmp_path_factory.mktemp("surroundings")
    for split in ("train", "val"):
        draw_pictures(root / "pictures" / split, {"Äpfel": 48, "犬": 48})
    words = (*EVERYTHING, *FOLDER, "DATA.KWARGS={}", f"DATA.PATH={root}/pictures")
    folders = {setting: root / setting.replace("/", " ") for setting in SETTINGS}
    for setting, folder in folders.items():
        process = begin(folder, *words, **SETTINGS[setting])
        seconds_to_end(process)
        end_all(process)
        assert process.returncode == 0, said(folder)
    return folders


def test_f32_the_same_run_everywhere(runs):
    first, *others = runs.values()
    same = [equal_digests(folder, first) for folder in others]
    logged = [figures(metrics(folder)) == figures(metrics(first)) for folder in others]
    names = {Path(folder, "classes.txt").read_text(encoding="utf-8") for folder in runs.values()}
    assert names == {"Äpfel\n犬\n"}
    what = "runs with the same state digests, one per setting (of 5)"
    record("F32", what, 1 + same.count(DIGESTS), 5)
    record("F32", "runs that log the same metrics (of 5)", 1 + sum(logged), 5)


def answers_under_o(lines, own):
    """Return (exit code, stderr) of each command line. The first `own` run as separate processes,
    the others in one."""
    environ = environment(PYTHONOPTIMIZE="1")
    settings = dict(capture_output=True, text=True)
    ends = [subprocess.run(command(*line), env=environ, **settings) for line in lines[:own]]
    words = [sys.executable, "-c", ALL_IN_ONE, json.dumps(lines[own:])]
    together = subprocess.run(words, env=environ, check=True, **settings).stdout
    return [(end.returncode, end.stderr) for end in ends] + [
        (code, errors) for code, _, errors in json.loads(together)
    ]


def test_f32_checks_stay_on_without_asserts(tmp_path, monkeypatch):
    """Under -O, the command has the same exit code and message as without."""
    monkeypatch.chdir(tmp_path)
    start = ["train", *TINY, "--output_dir", str(tmp_path / "run")]
    lines = [[*start, *words] for words in WRONG + WRONG_LATER]
    wanted = [(ended.code, ended.err) for ended in (vil(*line) for line in lines)]
    assert {code for code, _ in wanted} == {2, 3, 4}
    found = answers_under_o(lines, len(WRONG))
    assert not (tmp_path / "run").exists()
    alike = sum(ours == theirs for ours, theirs in zip(found, wanted))
    record("F32", "invalid configs refused with the same message under -O (of 16)", alike, 16)
