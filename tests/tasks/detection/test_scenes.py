"""The embedded scenes: an ordinary set in COCO's format, the same for everyone, written once."""

import hashlib
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from vil.data.synthetic import scenes
from vil.data.synthetic.scenes import find_scenes, write_scenes
from vil.tasks.detection.data.datasets import build_detection_set
from vil.utils.errors import DataError

TINY = {"train": 2, "val": 1, "low": 48, "high": 51}
SETTINGS = {"seed": 0, **TINY}
DIGEST = "6141a0d0bd996c5e1eb06afe855c224b177a9bd245573681b405d21fbfc67789"
JSON = "annotations/instances_{}.json"


def digest(folder):
    """Of the annotations and of the decoded pixels."""
    found = hashlib.sha256()
    for file in sorted(Path(folder).rglob("*")):
        if file.suffix == ".json":
            found.update(file.read_bytes())
        elif file.is_file():
            found.update(f"{file.relative_to(folder)}".encode())
            found.update(np.asarray(Image.open(file)).tobytes())
    return found.hexdigest()


def test_the_scenes_are_those_of_the_published_measurements(tmp_path):
    """A new digest means a new data set: raise scenes.VERSION and repeat the benchmarks."""
    write_scenes(tmp_path / "scenes", **TINY)
    assert digest(tmp_path / "scenes") == DIGEST


def test_worker_processes_draw_the_same(tmp_path):
    write_scenes(tmp_path / "scenes", workers=2, **TINY)
    assert digest(tmp_path / "scenes") == DIGEST


def test_a_seed_changes_all_and_a_count_nothing_else(tmp_path):
    write_scenes(tmp_path / "one", **TINY)
    write_scenes(tmp_path / "more", **(TINY | {"train": 3}))
    write_scenes(tmp_path / "other", seed=1, **TINY)
    for name in ("train/000001.png", "train/000002.png", "val/000001.png"):
        one, more, other = (
            np.asarray(Image.open(tmp_path / f / name)) for f in ("one", "more", "other")
        )
        assert np.array_equal(one, more)
        assert not np.array_equal(one, other)


@pytest.mark.parametrize("split", ["train", "val"])
def test_pycocotools_reads_them(scenes_root, small, split):
    (root,) = scenes_root.glob("scenes*")
    table = COCO(root / JSON.format(split))
    assert len(table.imgs) == small[split]
    assert [c["name"] for c in table.cats.values()] == list("0123456789")
    dataset = build_detection_set("scenes", scenes_root, split, masks=True, **small)
    assert dataset.dropped == []
    assert len(dataset) == small[split]
    for image, target in (dataset[i] for i in range(len(dataset))):
        height, width = image.shape[-2:]
        assert small["low"] <= min(height, width) <= max(height, width) <= small["high"]
        rows = table.loadAnns(table.getAnnIds([target["image_id"]]))
        assert 1 <= len(rows) <= scenes.MAX_DIGITS
        for row, mask, (x1, y1, x2, y2) in zip(
            rows, target["masks"].numpy(), target["boxes"].tolist(), strict=True
        ):
            assert np.array_equal(mask, table.annToMask(row))
            assert row["area"] == mask.sum()
            assert row["iscrowd"] == 0
            ys, xs = mask.nonzero()
            assert [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1] == [x1, y1, x2, y2]
        assert (target["masks"].sum(dim=0) <= 1).all()  # what covers is not covered


def test_what_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stop(*args):
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(scenes, "rename_new", stop)
        with pytest.raises(Stop):
            find_scenes(tmp_path, **SETTINGS)
    assert list(tmp_path.iterdir()) == []
    folder = find_scenes(tmp_path, **SETTINGS)
    assert list(tmp_path.iterdir()) == [folder]
    stamp = (folder / JSON.format("val")).stat().st_mtime_ns
    assert find_scenes(tmp_path, **SETTINGS) == folder
    assert (folder / JSON.format("val")).stat().st_mtime_ns == stamp
    with pytest.raises(FileExistsError):
        write_scenes(folder, **TINY)


def found_by(root):
    """What another process finds."""
    return str(find_scenes(root, **SETTINGS))


def test_processes_that_write_at_once_find_the_same(tmp_path):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        folders = set(pool.map(found_by, [tmp_path] * 6, chunksize=1))
    assert [str(folder) for folder in tmp_path.iterdir()] == list(folders)
    assert digest(folders.pop()) == DIGEST


def test_bad_settings_and_places(tmp_path):
    with pytest.raises(ValueError, match="given low 20 and high 90"):
        write_scenes(tmp_path / "a", low=20, high=90)
    with pytest.raises(ValueError, match="got train 0, val 400 and seed 0"):
        write_scenes(tmp_path / "a", train=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written to"):
        find_scenes(tmp_path / "file", **SETTINGS)
