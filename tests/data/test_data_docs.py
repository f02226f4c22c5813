"""docs/guides/data_archives.md writes valid data sets, data_formats.md lists every set."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.common.data_files import describe_arguments, samples, write_folder
from vil.data import DATASETS, build_dataset

GUIDES = Path(__file__).parents[2] / "docs/guides"
ARCHIVES = (GUIDES / "data_archives.md").read_text(encoding="utf-8")
FORMATS = (GUIDES / "data_formats.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["tar", "imagenet", "tsv"])
def test_the_commands_write_the_same_dataset_as_the_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        write_folder(tmp_path / "pictures", split, samples(split, per_class=2))
    zips, tsvs = re.findall(r"```python\n(.*?)```", ARCHIVES, flags=re.DOTALL)
    if name == "tar":
        (command,) = re.findall(r"```bash\n(.*?)```", ARCHIVES, flags=re.DOTALL)
        subprocess.run(["bash", "-ec", command], check=True)
    else:
        exec({"imagenet": zips, "tsv": tsvs}[name], {})
    for split in ("train", "val"):
        written, folder = (
            build_dataset(*args, split) for args in ((name, "."), ("folder", "pictures"))
        )
        assert np.array_equal(written.targets, folder.targets)
        assert all(written[i][0].tobytes() == folder[i][0].tobytes() for i in range(20))
        assert len(written.classes) == 10


def test_the_table_has_every_dataset_and_its_own_arguments():
    rows = dict(re.findall(r"^\| `([\w<>.]+)` \|.*\| (.*?) ?\|$", FORMATS, flags=re.MULTILINE))
    rows = {name: row.replace("\\|", "|") for name, row in rows.items()}
    assert rows.keys() == DATASETS.keys() | {"<path>.yaml", "<path>.csv", "<path>.tar"}
    for name, entry in DATASETS.items():
        assert rows[name] == describe_arguments(entry.load()), name
