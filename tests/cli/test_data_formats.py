"""Every data format through `vil train`, several sets at once, and data that cannot be used."""

import json
import re
from pathlib import Path

import pytest

from tests.common.data_files import samples, write_all_formats, write_tsv
from tests.common.small_runs import SMALL, draw_pictures, results, vil

DATA = 3
TEN = (*SMALL, "DATA.NUM_CLASSES=10", "DATALOADER.BSZ=8", "OPTIM.EPOCHS=1", "LOG_FREQ=100")
ENOUGH = "DATA.MAX_BAD_FRACTION=0.2"


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield write_all_formats(tmp_path_factory.mktemp("data"), monkeypatch)


@pytest.mark.parametrize("name", ["imagenet", "tar", "train.yaml", "cifar"])
def test_every_format_trains_and_evaluates(name, data):
    test = "val.yaml" if name == "train.yaml" else name
    sets = [f"DATA.TRAIN=[{name}]", f"DATA.TEST=[{test}]"]
    ended = vil("train", *TEN, *sets, ENOUGH, "--data", data, "--output_dir", "run")
    assert ended.code == 0, ended.err
    found = results_of("run")[test]
    assert found["count"] >= 10


def results_of(folder):
    ended = vil("evaluate", "--run", folder)
    assert ended.code == 0, ended.err
    return results(folder)


def test_several_sets_at_once(data):
    """Joined for training; evaluated one by one."""
    sets = ["DATA.TRAIN=[imagenet,tsv]", "DATA.TEST=[tar,cifar]", "DATALOADER.BSZ=20"]
    ended = vil("train", *TEN, *sets, ENOUGH, "--data", data, "--output_dir", "run")
    assert ended.code == 0, ended.err
    assert "step 1/1" in ended.out  # 11 rows each
    assert results_of("run").keys() == {"tar", "cifar"}


def test_a_target_map_evaluates_on_a_set_with_other_classes():
    """Model classes 0 and 2 stand for the folders cat and dog."""
    draw_pictures("pets", {"train/cat": 8, "train/dog": 8, "val/cat": 2, "val/dog": 3})
    Path("pets/map.json").write_text(json.dumps({"0": "cat(n1)", "2": "dog(n2)"}))
    fake = ("DATA.TRAIN=[fake]", "DATA.TEST=[fake]", "DATA.KWARGS={n: 32, num_classes: 10}")
    assert vil("train", *TEN, *fake, "--output_dir", "run").code == 0
    words = ["DATA.TEST=[folder]", "DATA.TARGETMAP=map.json"]
    ended = vil("evaluate", "--run", "run", "--data", "pets", *words)
    assert ended.code == 0, ended.err
    assert results("run")["folder"]["count"] == 5


def refused(ended, pattern):
    """One line and the exit code of data errors."""
    assert ended.code == DATA, ended.err
    assert re.search(pattern, ended.err), ended.err
    assert ended.err.count("\n") == 1, ended.err
    assert not Path("out").exists()


def train(*words):
    return vil("train", *TEN, *words, "--data", ".", "--output_dir", "out")


def test_sets_with_different_numbers_of_classes():
    draw_pictures(".", {"train/cat": 3, "train/dog": 3, "val/cat": 1})
    write_tsv(Path(), "train", samples("train"))
    sets = ("DATA.TRAIN=[tsv,folder]", "DATA.TEST=[folder]")
    refused(train(*sets), r"different numbers of classes cannot be concatenated: tsv 10, folder 2")
