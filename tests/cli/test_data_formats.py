"""Several sets, each in another format, through `vil train` and `vil evaluate`."""

from tests.common.data_files import write_all_formats
from tests.common.small_runs import SMALL, results, succeeds


def test_several_sets_at_once(tmp_path, monkeypatch):
    """Joined for training; evaluated one by one."""
    write_all_formats(tmp_path, monkeypatch)
    words = (
        *SMALL, "DATA.TRAIN=[imagenet,tsv]", "DATA.TEST=[tar,cifar]", "DATA.NUM_CLASSES=10",
        "DATALOADER.BSZ=20", "OPTIM.EPOCHS=1", "DATA.MAX_BAD_FRACTION=0.2",
    )  # fmt: skip
    shown = succeeds("train", *words, "--data", tmp_path, "--output_dir", "run")
    assert "an epoch has 1 step of 20 images" in shown  # 11 rows each
    succeeds("evaluate", "--run", "run")
    assert results("run").keys() == {"tar", "cifar"}
