"""Python's options, the locale and the time zone change neither the weights nor the checks."""

from pathlib import Path

import pytest

from tests.common.faults.real_runs import finish
from tests.common.faults.same_runs import EVERYTHING, assert_same_end
from tests.common.small_runs import (
    FOLDER,
    draw_pictures,
    figures,
    metrics,
)

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SETTINGS = {
    "PYTHONHASHSEED=0": {"PYTHONHASHSEED": "0"},
    "PYTHONHASHSEED=1, TZ=Asia/Kathmandu, LC_ALL=C": {
        "PYTHONHASHSEED": "1", "TZ": "Asia/Kathmandu", **ASCII,
    },
    # warnings of all packages, none left out
    "python -O -W error": {"PYTHONOPTIMIZE": "1", "PYTHONWARNINGS": "error"},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{setting: folder} of the same run, on images whose class names are not ASCII."""
    root = tmp_path_factory.mktemp("surroundings")
    for split in ("train", "val"):
        draw_pictures(root / "pictures" / split, {"Äpfel": 48, "犬": 48})
    words = (*EVERYTHING, *FOLDER, "DATA.KWARGS={}", f"DATA.PATH={root}/pictures")
    folders = {setting: root / setting.replace("/", " ") for setting in SETTINGS}
    for setting, folder in folders.items():
        finish(folder, *words, **SETTINGS[setting])
    return folders


def test_the_same_run_everywhere(runs):
    first, *others = runs.values()
    for folder in others:
        assert_same_end(folder, first)
        assert figures(metrics(folder)) == figures(metrics(first))
    for folder in runs.values():
        assert Path(folder, "classes.txt").read_text(encoding="utf-8") == "Äpfel\n犬\n"
