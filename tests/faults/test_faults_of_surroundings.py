"""Python's options, the locale and the time zone change neither the weights nor the checks."""

from pathlib import Path

import pytest

from tests.common.faults.real_runs import begin, end_all, said, wait_for_end
from tests.common.faults.records import record
from tests.common.faults.same_runs import EVERYTHING, equal_digests
from tests.common.small_runs import (
    FOLDER,
    draw_pictures,
    figures,
    metrics,
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
        wait_for_end(process)
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
