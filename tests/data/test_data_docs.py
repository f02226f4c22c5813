"""docs/guides/data.md writes valid data sets, and lists every set."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.common.data_files import samples, write_folder
from vil.data import build_dataset

PAGE = (Path(__file__).parents[2] / "docs/guides/data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["tar", "imagenet"])
def test_the_commands_write_the_same_dataset_as_the_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        write_folder(tmp_path / "pictures", split, samples(split, per_class=2))
    if name == "tar":
        (command,) = re.findall(r"^for split .* done$", PAGE, flags=re.MULTILINE)
        subprocess.run(["bash", "-ec", command], check=True)
    else:
        (code,) = re.findall(r"```python\n(import zipfile.*?)```", PAGE, flags=re.DOTALL)
        exec(code, {})
    for split in ("train", "val"):
        written, folder = (
            build_dataset(*args, split) for args in ((name, "."), ("folder", "pictures"))
        )
        assert np.array_equal(written.targets, folder.targets)
        assert all(written[i][0].tobytes() == folder[i][0].tobytes() for i in range(20))
        assert len(written.classes) == 10
